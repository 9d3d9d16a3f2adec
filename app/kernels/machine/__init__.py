"""How CPU kernels are compiled, vectorised, given threads and memory."""
