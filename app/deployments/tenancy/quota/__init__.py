"""Limits of tenants and how an ingress enforces them."""
