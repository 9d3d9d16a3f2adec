"""LoRA deltas over rank-row tables where every row has an adapter of its own (decoding)."""
