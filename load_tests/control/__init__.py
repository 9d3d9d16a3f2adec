"""Costs of adapters, the registry and the control plane, apart from the streams."""
