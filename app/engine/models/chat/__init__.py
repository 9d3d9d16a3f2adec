"""Chat templates and tool-call formats."""
