"""Routes of the HTTP application, a module for each group."""
