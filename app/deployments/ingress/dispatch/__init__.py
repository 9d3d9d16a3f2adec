"""Dispatch: routing of tokenized requests to replicas, connections and retries."""
