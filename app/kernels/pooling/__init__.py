"""Sums of rows: what a text's embedding is pooled from."""
