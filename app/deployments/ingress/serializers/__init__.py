"""Results of the service as JSON bodies and stream events."""
