"""ASGI middleware of the HTTP application."""
