"""What the service costs over HTTP, and traffic to measure it with."""
