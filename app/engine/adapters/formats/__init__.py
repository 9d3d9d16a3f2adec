"""How adapters lie in files: PEFT folders and Arrow cards."""
