"""Scheduling of an engine's steps: fair order, admission, chunked prefill and the step's schedule."""
