"""Demo adapters, their training, and programs that use the service."""
