"""The CPU engine's device: NumPy and this project's compiled kernels."""
