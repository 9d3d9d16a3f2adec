"""LoRA, attention and matrix arithmetic on plain arrays; one folder per operation."""
