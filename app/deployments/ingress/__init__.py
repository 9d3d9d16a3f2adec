"""Ingress: HTTP and Python requests, preprocessed, dispatched to replicas and answered."""
