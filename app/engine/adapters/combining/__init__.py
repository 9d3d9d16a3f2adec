"""Combining several adapters into one."""
