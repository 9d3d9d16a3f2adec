"""Tokenizers from a folder or a GGUF file, and incremental detokenization."""
