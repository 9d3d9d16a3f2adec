"""LoRA deltas of runs of tokens over rank-row tables."""
