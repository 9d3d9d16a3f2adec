"""The grammar an answer must follow, from `response_format`, `structured_outputs` and vLLM's older `guided_*`.

A request may use one of these fields. What cannot be enforced is an error that names the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from app.deployments.ingress.error_responses import InvalidJson
from app.deployments.ingress.json_parser import parse_json
from app.deployments.ingress.schemas.openai import SamplingFields
from app.engine.errors import InvalidRequest
from app.engine.structured_output.grammar_builder import (
    check_length,
    choice_grammar,
    client_lark_grammar,
    json_grammar,
    regex_grammar,
    schema_rule,
)

#: Schema of any JSON object.
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class RequestedGrammar(NamedTuple):
    """`place` is the field it comes from; `schemas` lists its JSON schemas, each with its place.

    `is_lenient`: the schemas were reduced to what can be enforced; `unenforced` names the rest. `prefix`: the beginning
    of the answer, which the client has sent.
    """

    grammar: str
    place: str
    schemas: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    is_lenient: bool = False
    unenforced: tuple[str, ...] = ()
    prefix: str = ""

    @property
    def rule(self) -> str:
        """The right side of a grammar rule. Raises InvalidRequest if it is not JSON."""
        if not self.schemas:
            raise InvalidRequest(f"{self.place}: cannot be combined with tools; use response_format", param=self.place)
        return schema_rule(self.schemas[0][1], self.place, lenient=self.is_lenient)


#: The part of a schema that can be enforced and the places of the rest, given the schema and its place.
Reduce = Callable[[Mapping[str, Any], str], tuple[Mapping[str, Any], tuple[str, ...]]]


def requested_grammar(fields: SamplingFields, reduce: Reduce) -> RequestedGrammar | None:
    """The grammar of an answer; None if it is free. Raises InvalidRequest.

    A `json_schema` without `strict: true` is enforced as far as possible, every other grammar completely.
    """
    grammars = [
        item
        for item in (_response_format(fields, reduce), *_structured_outputs(fields), *_guided_fields(fields))
        if item is not None
    ]
    if len(grammars) > 1:
        places = " and ".join(item.place for item in grammars)
        raise InvalidRequest(f"{places} are given; use one of them", param=grammars[1].place)
    return grammars[0] if grammars else None


def _response_format(fields: SamplingFields, reduce: Reduce) -> RequestedGrammar | None:
    form = fields.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return _json(ANY_OBJECT, "response_format")
    assert form.json_schema is not None, "the body was checked"
    schema = ANY_OBJECT if form.json_schema.schema_ is None else form.json_schema.schema_
    place = "response_format.json_schema.schema"
    if form.json_schema.strict:
        return _json(schema, place)
    schema, unenforced = reduce(schema, place)
    return RequestedGrammar(json_grammar(schema, place, lenient=True), place, ((place, schema),), True, unenforced)


def _structured_outputs(fields: SamplingFields) -> list[RequestedGrammar | None]:
    form = fields.structured_outputs
    if form is None:
        return []
    grammars = _grammars_of("structured_outputs.", form.json_, form.regex, form.choice, form.grammar)
    return [*grammars, _json(ANY_OBJECT, "structured_outputs.json_object")] if form.json_object else grammars


def _guided_fields(fields: SamplingFields) -> list[RequestedGrammar | None]:
    return _grammars_of("guided_", fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)


def _grammars_of(
    prefix: str,
    schema: Mapping[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[RequestedGrammar | None]:
    return [
        None if schema is None else _json(_parse_schema(schema, f"{prefix}json"), f"{prefix}json"),
        None if regex is None else RequestedGrammar(regex_grammar(regex, f"{prefix}regex"), f"{prefix}regex"),
        None if choice is None else RequestedGrammar(choice_grammar(choice, f"{prefix}choice"), f"{prefix}choice"),
        None
        if grammar is None
        else RequestedGrammar(client_lark_grammar(grammar, f"{prefix}grammar"), f"{prefix}grammar"),
    ]


def _json(schema: Mapping[str, Any], place: str) -> RequestedGrammar:
    return RequestedGrammar(json_grammar(schema, place), place, ((place, schema),))


def _parse_schema(schema: Mapping[str, Any] | str, place: str) -> Mapping[str, Any]:
    if not isinstance(schema, str):
        return schema
    check_length(schema, place)
    try:
        parsed = parse_json(schema.encode(), place)
    except InvalidJson as error:
        raise InvalidRequest(str(error), param=place) from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{place}: a JSON schema must be an object", param=place)
    return parsed
