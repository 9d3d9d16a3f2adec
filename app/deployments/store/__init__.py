"""The adapter store: the machine's copies of adapters, and the actor that serves them and the registry."""
