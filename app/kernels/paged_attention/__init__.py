"""Attention over block tables."""
