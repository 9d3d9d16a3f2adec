"""Tokens guessed before they are drawn, to verify several in one step."""
