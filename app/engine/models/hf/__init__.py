"""Hugging Face folders: `config.json` of each architecture, tensor names, safetensors."""
