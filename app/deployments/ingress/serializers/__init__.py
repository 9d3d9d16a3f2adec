"""Response bodies and stream events."""
