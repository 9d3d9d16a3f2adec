"""Tests of `app.engine.spec_decode`."""
