"""Accounting of device memory: KV blocks, rank rows and adapter slots."""
