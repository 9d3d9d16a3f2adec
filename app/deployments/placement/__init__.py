"""Which replica serves which adapter."""
