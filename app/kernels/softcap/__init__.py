"""Rows times a number, and soft caps."""
