"""polylora: one base language model, many LoRA adapters, many tenants, one Ray Serve application."""
