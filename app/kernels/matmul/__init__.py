"""Dense products with packed weights."""
