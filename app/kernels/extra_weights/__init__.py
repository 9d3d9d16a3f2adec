"""What an adapter does to rows beside its low-rank deltas."""
