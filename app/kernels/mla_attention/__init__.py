"""Attention over one latent vector per token, from which the keys and values of all heads come."""
