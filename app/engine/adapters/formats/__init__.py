"""File formats of adapters: PEFT folders and Arrow cards."""
