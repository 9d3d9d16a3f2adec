"""Reading untrusted adapters in a sandboxed process."""
