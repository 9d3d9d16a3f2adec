"""Adapters from OCI registries."""
