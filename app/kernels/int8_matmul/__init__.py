"""Dense products in 8-bit integers: rows quantised per token and group, weights as they are stored."""
