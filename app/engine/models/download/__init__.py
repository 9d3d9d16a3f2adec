"""Model files from hubs, package indexes and folders."""
