"""The registry: what every name means, kept in a database that outlives all processes."""
