"""Batches as an ingress works on them."""
