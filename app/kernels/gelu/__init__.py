"""gelu, the activation of a feed-forward without a gate."""
