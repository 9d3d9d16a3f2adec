"""Base class and validation of request bodies.

A field that could change the result and is not implemented is rejected unless it has its neutral value (`NEUTRAL`).
Fields that cannot change the result are accepted and ignored (`INERT`). Like with OpenAI, null means absent for every
optional field at any depth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.engine.errors import InvalidRequest, UnsupportedField
from app.redaction import holds_key
from app.suggestions import did_you_mean, fields_at

#: Accepted and ignored: these cannot change the answer's tokens.
INERT = frozenset({
    "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "service_tier",
})  # fmt: skip


#: Not implemented; accepted at these values, which clients send by default.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}


#: Explanations for rejecting some of them.
REASONS: Mapping[str, str] = {
    "chat_template_kwargs": "use it with /v1/chat/completions or /tokenize",
    "suffix": "these models were not trained to fill in the middle",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "tools": "use /v1/chat/completions, /v1/responses or /v1/messages",
}


#: Names of the adapter field in other servers.
ADAPTER_WORDS = frozenset(
    {"lora_name", "lora", "lora_id", "lora_adapter", "lora_request", "adapter", "adapter_name", "adapter_id"}
)


T = TypeVar("T")


#: A list that is checked up to its first error: a million errors would need gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]


def _without_keys(metadata: dict[str, str]) -> dict[str, str]:
    if any(holds_key(text) for pair in metadata.items() for text in pair):
        raise ValueError("it contains an API key, and metadata is stored and returned; leave the key out")
    return metadata


#: A client's metadata, stored and returned.
Metadata = Annotated[dict[str, str], AfterValidator(_without_keys)]


class Body(BaseModel):
    """A JSON object. Null means the default, and is ignored for an unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    #: Whether it is an inference request, which accepts `INERT` and `NEUTRAL`.
    is_inference: ClassVar[bool] = False
    #: Whether a request without a body counts as `{}`.
    may_be_empty: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        fields, required = _field_names(cls)
        if not isinstance(value, dict) or (value.keys() <= fields and None not in value.values()):
            return value
        # One unknown field is enough to reject the body: reporting 300,000 takes seconds.
        unknown = next((name for name, item in value.items() if name not in fields and item is not None), None)
        kept = fields | {unknown}
        return {name: item for name, item in value.items() if name in required or (item is not None and name in kept)}


@cache
def _field_names(kind: type[Body]) -> tuple[frozenset[str], frozenset[str]]:
    """(all field names, required ones), by alias. Cached: a request may contain 100,000 bodies."""
    named = {field.alias or name: field for name, field in kind.model_fields.items()}
    return frozenset(named), frozenset(name for name, field in named.items() if field.is_required())


BodyT = TypeVar("BodyT", bound=Body)


def ignored_fields_schema(kind: type[Body]) -> dict[str, Any]:
    """JSON schemas of the fields that a body accepts and ignores."""
    if not kind.is_inference:
        return {}
    inert, neutral = INERT - kind.model_fields.keys(), NEUTRAL.keys() - kind.model_fields.keys()
    schemas: dict[str, Any] = {name: {"description": "Accepted and ignored."} for name in sorted(inert)}
    for name, values in sorted((name, NEUTRAL[name]) for name in neutral):
        schemas[name] = {"enum": list(values), "description": "Not implemented; accepted at these values."}
    return schemas


def parse_body(kind: type[BodyT], value: object) -> BodyT:
    """Check a decoded JSON value against `kind`. Raises UnsupportedField or InvalidRequest naming the field."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_json_type(value)}")
    fields = dict(value)
    for name in value:
        if name in kind.model_fields or fields[name] is None:
            continue
        if kind.is_inference and (
            name in INERT or any(_same(fields[name], neutral) for neutral in NEUTRAL.get(name, ()))
        ):
            del fields[name]
        else:
            raise UnsupportedField(_refusal(kind, name), param=_quotable(name))
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(kind, error) from error


def _refusal(kind: type[Body], name: str) -> str:
    if kind.is_inference and name in NEUTRAL:
        allowed = " or ".join(json.dumps(value) for value in NEUTRAL[name])
        reason = f": {REASONS[name]}" if name in REASONS else ""
        return f"{name!r} is not implemented here{reason}; leave it out or send {allowed}"
    guess = did_you_mean(name, kind.model_fields)
    if kind.is_inference and name in ADAPTER_WORDS:
        field = "model" if "model" in kind.model_fields else "lora_path"
        guess = f"; name the adapter in {field!r}"
    if kind.is_inference:
        return f"unknown field {name[:80]!r}; it could change the answer, so it is rejected rather than ignored{guess}"
    return f"unknown field {name[:80]!r}; this route takes {', '.join(kind.model_fields)}{guess}"


def _invalid(body: type[Body], error: ValidationError) -> InvalidRequest:
    """The most helpful of pydantic's errors as an InvalidRequest that names the field.

    A union reports an error per branch. The branch that got deepest is used (the wrong list item, not "not a string"),
    and among those one whose types fit (a token id below 0). Branch names are not part of the field's path.
    """
    items = error.errors(include_url=False, include_context=False, include_input=False)
    field = items[0]["loc"][:-1]
    same_field = [item for item in items if item["loc"][: len(field)] == field] if field else items[:1]
    deepest = [item for item in same_field if len(item["loc"]) > len(field) + 1] or items[:1]
    first = next((item for item in deepest if not item["type"].endswith("_type")), deepest[0])
    path = [part for part in first["loc"] if isinstance(part, int) or _is_field(part)]
    location = ".".join(_quotable(str(part)) for part in path)
    name = str(first["loc"][0]) if first["loc"] else None
    is_object = first["type"] in ("model_type", "dict_type")
    message = "Input should be an object" if is_object else first["msg"].removeprefix("Value error, ")
    kind = UnsupportedField if first["type"] == "extra_forbidden" else InvalidRequest
    if first["type"] == "extra_forbidden":
        guess = did_you_mean(str(first["loc"][-1]), fields_at(body, first["loc"][:-1]))
        message = f"unknown field; it could change the answer, so it is rejected rather than ignored{guess}"
    return kind(f"{location}: {message}" if location else message, param=location or name)


def _is_field(part: str) -> bool:
    """Whether a part of an error's location is a field and not the name of a union's branch."""
    return part.isidentifier() and part != "str" and not part[0].isupper()


def _quotable(name: str) -> str:
    """A client's string as an error may repeat it: short and without lone surrogates, which JSON can contain."""
    return name[:80].encode("utf-8", "backslashreplace").decode()


def _same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


def _json_type(value: object) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
