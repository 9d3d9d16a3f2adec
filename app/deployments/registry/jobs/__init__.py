"""Load and unload jobs, and which store works on them."""
