"""Dispatch: placement of requests in token ids on replicas, connections, retries."""
