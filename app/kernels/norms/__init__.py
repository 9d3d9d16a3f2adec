"""RMS norm of every row."""
