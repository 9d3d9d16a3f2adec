"""Load and unload jobs, and the leases of the stores that work on them."""
