"""Several adapters made into one: what is asked for, and the arithmetic."""
