"""Replica: one engine as a Serve deployment, with its reports, pins and adapters."""
