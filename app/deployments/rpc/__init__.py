"""Between processes: frames, calls, tables that are pushed."""
