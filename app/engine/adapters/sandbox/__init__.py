"""Reading untrusted adapters in a process that may die."""
