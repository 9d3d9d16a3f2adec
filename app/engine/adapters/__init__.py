"""LoRA adapters: what one is, and the formats it is read from."""
