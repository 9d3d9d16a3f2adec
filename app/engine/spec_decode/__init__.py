"""Speculative decoding: several draft tokens verified in one step."""
