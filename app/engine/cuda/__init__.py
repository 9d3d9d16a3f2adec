"""The CUDA engine's device: torch and Triton."""
