"""The schema's history, one revision per file; `app.deployments.registry.database` applies what is missing."""
