"""Bodies of requests and responses: pydantic models, which `/openapi.json` is made from."""
