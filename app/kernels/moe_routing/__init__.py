"""Routing of tokens to experts: which, sorted how, and the sum of what they give."""
