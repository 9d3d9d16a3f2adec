"""Whose turn it is: admission, fairness, prefill beside decoding."""
