"""From a request in token ids to its tokens: placement, connections to replicas, retries."""
