"""Projects, service accounts and API keys."""
