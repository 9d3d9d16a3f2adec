"""Dense products in bfloat16: rows rounded, weights stored rounded, sums in float32 in the order of AMX's tiles."""
