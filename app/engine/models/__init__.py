"""Base models: their shapes, their weights, their tokenizer."""
