"""Random JSON schemas, and whether a text is valid by one."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np


def random_schema(generator: np.random.Generator, depth: int = 0) -> dict[str, Any]:
    """Objects, arrays, strings, numbers, enumerations and unions of them, nested twice at most."""
    kind = int(generator.integers(4 if depth > 1 else 8))
    if kind == 0:
        return {"type": "string", "maxLength": int(generator.integers(0, 6))}
    if kind == 1:
        low = int(generator.integers(-50, 50))
        return {"type": "integer", "minimum": low, "maximum": low + int(generator.integers(0, 200))}
    if kind == 2:
        return {"enum": [["red", "green"], [1, 2.5, None], [True, False]][int(generator.integers(3))]}
    if kind == 3:
        return {"type": "string", "pattern": ["^[0-9]{3}$", "^(ab|na)+$", "^x?y*z$"][int(generator.integers(3))]}
    if kind == 4:
        lengths = {"minItems": int(generator.integers(3)), "maxItems": int(generator.integers(2, 4))}
        return {"type": "array", "items": random_schema(generator, depth + 1)} | lengths
    if kind == 5:
        return {"anyOf": [random_schema(generator, depth + 1) for _ in range(2)]}
    names = ["a", "b", "name", "n12"][: int(generator.integers(1, 5))]
    return {
        "type": "object",
        "properties": {name: random_schema(generator, depth + 1) for name in names},
        "required": [name for name in names if generator.integers(2)],
        "additionalProperties": False,
    }


def follows(text: str, grammar: str) -> bool:
    """Whether a text is JSON that is valid by the schema of a grammar (`json_grammar`)."""
    schema = json.loads(grammar)["grammars"][0]["json_schema"]
    schema.pop("x-guidance", None)
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
