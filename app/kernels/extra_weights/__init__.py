"""What an adapter does to rows besides its low-rank deltas."""
