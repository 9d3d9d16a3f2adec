"""Tests of `app.engine.structured_output`."""
