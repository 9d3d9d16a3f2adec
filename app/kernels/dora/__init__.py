"""The norms of rows of W + BA, for DoRA."""
