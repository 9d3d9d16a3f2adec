"""Attention in which every token of a sequence sees every other, without memory beyond the call."""
