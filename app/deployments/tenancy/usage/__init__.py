"""Usage: recorded in each process, flushed to the ledger, queried from it."""
