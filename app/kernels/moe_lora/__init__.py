"""LoRA deltas of experts, after routing."""
