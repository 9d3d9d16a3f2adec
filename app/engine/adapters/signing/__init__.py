"""Adapter signatures and the keys that tenants trust."""
