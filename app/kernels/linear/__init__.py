"""A linear module with its bias, its adapters' deltas and their extra weights."""
