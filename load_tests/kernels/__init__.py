"""What single kernels cost, and which form and tiles are fastest."""
