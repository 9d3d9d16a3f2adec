"""Rows of float32 numbers, rounded into a buffer of another type."""
