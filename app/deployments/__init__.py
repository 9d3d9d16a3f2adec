"""The Ray Serve application: HTTP, text, tenants, placement and the actors."""
