"""Batch processing in an ingress."""
