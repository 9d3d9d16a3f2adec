"""The registry: what every name means, in a database that outlives all processes."""
