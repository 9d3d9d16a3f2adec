"""GGUF files: header, metadata, tensors, export."""
