"""Tenants' limits and how ingresses enforce them."""
