"""The torch engine: CPU through compiled kernels, CUDA through Triton."""
