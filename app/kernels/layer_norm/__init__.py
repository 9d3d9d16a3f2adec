"""Layer norm of every row."""
