"""What adapters and the registry cost beside the streams."""
