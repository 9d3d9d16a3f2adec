"""What an answer has to follow, from the fields of a request: a grammar, or nothing.

In: `response_format`, `structured_outputs` and vLLM's older `guided_*`. Out: a grammar's text. Rule: a request says in
one way what its answer is; two ways are refused, and so is what cannot be enforced, with the place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from app.deployments.ingress.schemas.openai import SamplingFields
from app.engine.errors import InvalidRequest
from app.engine.structured_output.grammar_builder import (
    choice_grammar,
    client_lark_grammar,
    json_grammar,
    regex_grammar,
    schema_rule,
)

#: Any JSON object.
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class RequestedGrammar(NamedTuple):
    """`place` is the field that says it; `schemas` are those in it, each with its place."""

    grammar: str
    place: str
    schemas: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    @property
    def rule(self) -> str:
        """As the right side of a rule. Raises InvalidRequest where it is no JSON."""
        if not self.schemas:
            raise InvalidRequest(
                f"{self.place}: is not taken together with tools; use response_format", param=self.place
            )
        return schema_rule(self.schemas[0][1], self.place, lenient=False)


def requested_grammar(fields: SamplingFields) -> RequestedGrammar | None:
    """What the answer has to follow. Raises InvalidRequest."""
    found = [item for item in (_response_format(fields), *_structured(fields), *_guided(fields)) if item is not None]
    if len(found) > 1:
        places = " and ".join(item.place for item in found)
        raise InvalidRequest(f"{places} are given; an answer follows one of them", param=found[1].place)
    return found[0] if found else None


def _response_format(fields: SamplingFields) -> RequestedGrammar | None:
    wanted = fields.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _json(ANY_OBJECT, "response_format")
    assert wanted.json_schema is not None, "the body was checked"
    schema = ANY_OBJECT if wanted.json_schema.schema_ is None else wanted.json_schema.schema_
    return _json(schema, "response_format.json_schema.schema")


def _structured(fields: SamplingFields) -> list[RequestedGrammar | None]:
    wanted = fields.structured_outputs
    if wanted is None:
        return []
    found = _each("structured_outputs.", wanted.json_, wanted.regex, wanted.choice, wanted.grammar)
    return [*found, _json(ANY_OBJECT, "structured_outputs.json_object")] if wanted.json_object else found


def _guided(fields: SamplingFields) -> list[RequestedGrammar | None]:
    return _each("guided_", fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)


def _each(
    prefix: str,
    schema: Mapping[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[RequestedGrammar | None]:
    return [
        None if schema is None else _json(_parsed(schema, f"{prefix}json"), f"{prefix}json"),
        None if regex is None else RequestedGrammar(regex_grammar(regex, f"{prefix}regex"), f"{prefix}regex"),
        None if choice is None else RequestedGrammar(choice_grammar(choice, f"{prefix}choice"), f"{prefix}choice"),
        None
        if grammar is None
        else RequestedGrammar(client_lark_grammar(grammar, f"{prefix}grammar"), f"{prefix}grammar"),
    ]


def _json(schema: Mapping[str, Any], place: str) -> RequestedGrammar:
    return RequestedGrammar(json_grammar(schema, place), place, ((place, schema),))


def _parsed(schema: Mapping[str, Any] | str, place: str) -> Mapping[str, Any]:
    if not isinstance(schema, str):
        return schema
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place}: is not JSON: {str(error)[:100]}", param=place) from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{place}: a JSON schema is an object", param=place)
    return found
