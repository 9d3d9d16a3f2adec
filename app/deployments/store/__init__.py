"""Adapters in tiers: sources, disk, host memory."""
