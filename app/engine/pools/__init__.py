"""Books over what a device holds: KV blocks and adapter rows."""
