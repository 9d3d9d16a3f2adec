"""The registry's database: connections, tables, retention."""
