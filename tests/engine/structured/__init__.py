"""Tests of `app.engine.structured`."""
