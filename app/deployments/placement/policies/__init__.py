"""Where an adapter may be served: a file per policy."""
