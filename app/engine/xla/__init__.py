"""The JAX engine: CPU, GPU and TPU through XLA; adapters load without recompiling."""
