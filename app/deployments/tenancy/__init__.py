"""Tenants: projects, their keys and limits, what they use, and what each process knows of them."""
