"""Usage from the process that counts it to the ledger, and queries over it."""
