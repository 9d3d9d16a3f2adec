"""Downloads model files from hubs and package indexes."""
