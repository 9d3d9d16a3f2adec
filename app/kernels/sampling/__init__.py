"""One token of every row of logits."""
