"""Registry changes, published to every process of the service."""
