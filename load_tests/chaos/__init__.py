"""Processes are killed and stopped under traffic, and every answer is checked."""
