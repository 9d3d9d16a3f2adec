"""A fleet on a virtual clock: the service's own decisions, with measured times instead of computed tokens."""
