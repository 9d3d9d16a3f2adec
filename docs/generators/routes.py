"""The page of HTTP routes, from OpenAPI."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from unittest.mock import MagicMock

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from docs.generators.markdown import table

_GROUPS = (
    ("Generation, embeddings and scores",
     r"/generate|/v1/(chat|completions|embeddings|score|rerank|classify|responses|messages|route|models)"),
    ("Tokenizer", r"/(de)?tokenize"),
    ("Adapters and aliases", r"/v1/(loras|aliases|jobs|events|audit|(un)?load_lora)"),
    ("Files and batches", r"/v1/(files|batches)"),
    ("Projects, keys, limits and usage", r"/v1/(organization|tenants)"),
    ("The service", r"/"),
)  # fmt: skip


def http_page() -> str:
    """Every route, by what it is for, with the fields of its body."""
    document = _openapi()
    schemas = document["components"]["schemas"]
    parts = ["# HTTP routes\n\n", _HTTP_INTRO]
    left = [(path, method, operation) for path, each in document["paths"].items() for method, operation in each.items()]
    for title, pattern in _GROUPS:
        found = [item for item in left if re.match(pattern, item[0])]
        left = [item for item in left if item not in found]
        parts.append(f"## {title}\n\n" if found else "")
        parts += [_route(path, method, operation, schemas) for path, method, operation in found]
    return "".join(parts).rstrip() + "\n"


_HTTP_INTRO = """A running service has the same at `GET /openapi.json`, with the schemas of answers.
Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, on `/v1/messages` Anthropic's. A field
that would change the answer and is not implemented is rejected by name. A field without a default is optional.

"""


def _openapi() -> dict[str, Any]:
    service: Any = MagicMock()  # routes are described, not called
    return make_app(service, HttpPolicy()).openapi()


def _route(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    says = operation.get("description", "").strip().partition("\n")[0]
    text = f"### {method.upper()} {path}\n\n" + (f"{says}\n\n" if says else "")
    query = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
    if query:
        text += "Query: " + ", ".join(f"`{name}`" for name in query) + ".\n\n"
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = content["schema"]
        if media != "application/json":
            text += f"Body: `{media}`.\n\n"
            continue
        schema = _resolved(schema, schemas)
        required = set(schema.get("required", ()))
        rows = (
            (f"`{name}`", _schema_type(field), "required" if name in required else _schema_default(field),
             field.get("description", "").strip().partition("\n")[0])
            for name, field in schema.get("properties", {}).items()
        )  # fmt: skip
        text += table(("field", "type", "default", "description"), rows) + "\n"
    return text


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    ref = schema.get("$ref")
    return schema if ref is None else schemas[ref.rpartition("/")[2]]


def _schema_type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    for word in ("anyOf", "oneOf"):
        if word in schema:
            kinds = (_schema_type(each) for each in schema[word] if each.get("type") != "null")
            return " or ".join(dict.fromkeys(kinds)) or "null"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_schema_type(schema.get('items', {}))}"
    return str(" or ".join(kind) if isinstance(kind, list) else kind)


def _schema_default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"
