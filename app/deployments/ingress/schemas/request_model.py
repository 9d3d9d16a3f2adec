"""What every request body has in common, and how one is checked.

In: a decoded JSON object. Out: a checked model, or an error that names the field. Rule: a field that would change the
result and is not implemented is refused unless its value is the neutral one; fields that cannot change the result are
accepted and ignored by name (`INERT`). As with OpenAI, null is as good as absent wherever a field may be absent, at any
depth.
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

#: Accepted and ignored: none of these can change the answer's tokens.
INERT = frozenset({
    "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "service_tier",
})  # fmt: skip


#: Not implemented, but harmless at these values, which clients send by default.
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


#: Why some of them stay so.
REASONS: Mapping[str, str] = {
    "chat_template_kwargs": "it is for /v1/chat/completions and /tokenize",
    "suffix": "the models here continue a text and have not learnt to fill a gap in one",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "tools": "tools are for /v1/chat/completions, /v1/responses and /v1/messages",
}


#: What other servers call the adapter of a request.
ADAPTER_WORDS = frozenset(
    {"lora_name", "lora", "lora_id", "lora_adapter", "lora_request", "adapter", "adapter_name", "adapter_id"}
)


T = TypeVar("T")


#: Checked up to its first mistake: a complaint about each of a million items is gigabytes of them.
Items = Annotated[list[T], Field(fail_fast=True)]


def _without_keys(words: dict[str, str]) -> dict[str, str]:
    if any(holds_key(text) for pair in words.items() for text in pair):
        raise ValueError("it holds an API key, and is kept and told again; leave the key out")
    return words


#: A client's own words that are kept for it.
Metadata = Annotated[dict[str, str], AfterValidator(_without_keys)]


class Body(BaseModel):
    """A JSON object. Null means the default, and nothing at all for a field that is not known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    #: Whether it asks for an answer: then `INERT` and `NEUTRAL` are accepted.
    is_inference: ClassVar[bool] = False
    #: Whether a request without a body means the body without fields.
    may_be_empty: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        fields, required = _field_names(cls)
        if not isinstance(value, dict) or (value.keys() <= fields and None not in value.values()):
            return value
        # One that is not known is enough to refuse: a complaint about each of 300,000 takes seconds.
        unknown = next((name for name, item in value.items() if name not in fields and item is not None), None)
        storage = fields | {unknown}
        return {
            name: item for name, item in value.items() if name in required or (item is not None and name in storage)
        }


@cache
def _field_names(kind: type[Body]) -> tuple[frozenset[str], frozenset[str]]:
    """What clients call a body's fields: all of them, and those that must be there. A request has 100,000 bodies."""
    named = {field.alias or name: field for name, field in kind.model_fields.items()}
    return frozenset(named), frozenset(name for name, field in named.items() if field.is_required())


BodyT = TypeVar("BodyT", bound=Body)


def ignored_fields_schema(kind: type[Body]) -> dict[str, Any]:
    """JSON schemas of what a body may say, beside its fields, without any effect."""
    if not kind.is_inference:
        return {}
    inert, neutral = INERT - kind.model_fields.keys(), NEUTRAL.keys() - kind.model_fields.keys()
    said: dict[str, Any] = {name: {"description": "Accepted; it changes nothing."} for name in sorted(inert)}
    for name, values in sorted((name, NEUTRAL[name]) for name in neutral):
        said[name] = {"enum": list(values), "description": "Not implemented; accepted at these values."}
    return said


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
        guess = f"; an adapter is asked for by its name, in {field!r}"
    if kind.is_inference:
        return f"unknown field {name[:80]!r}; it could change the answer, so it is refused rather than ignored{guess}"
    return f"unknown field {name[:80]!r}; this route takes {', '.join(kind.model_fields)}{guess}"


def _invalid(body: type[Body], error: ValidationError) -> InvalidRequest:
    """The first complaint, in words, and where: a union's complaint ends with the branch, which is no field.

    Of a union the branch that got further knows better: not "no string", but what is wrong in the list; and of
    the list's kinds the one whose types fit: not "no string", but a token id below 0.
    """
    items = error.errors(include_url=False, include_context=False, include_input=False)
    field = items[0]["loc"][:-1]
    of_one = [item for item in items if item["loc"][: len(field)] == field] if field else items[:1]
    further = [item for item in of_one if len(item["loc"]) > len(field) + 1] or items[:1]
    first = next((item for item in further if not item["type"].endswith("_type")), further[0])
    path = [part for part in first["loc"] if isinstance(part, int) or _is_field(part)]
    where = ".".join(_quotable(str(part)) for part in path)
    name = str(first["loc"][0]) if first["loc"] else None
    is_object = first["type"] in ("model_type", "dict_type")
    message = "Input should be an object" if is_object else first["msg"].removeprefix("Value error, ")
    kind = UnsupportedField if first["type"] == "extra_forbidden" else InvalidRequest
    if first["type"] == "extra_forbidden":
        guess = did_you_mean(str(first["loc"][-1]), fields_at(body, first["loc"][:-1]))
        message = f"unknown field; it could change the answer, so it is refused rather than ignored{guess}"
    return kind(f"{where}: {message}" if where else message, param=where or name)


def _is_field(part: str) -> bool:
    """Whether part of a complaint's place is a field, not the kind that a union's branch has."""
    return part.isidentifier() and part != "str" and not part[0].isupper()


def _quotable(name: str) -> str:
    """A client's word as an answer may repeat it: short, and without the half characters that JSON can spell."""
    return name[:80].encode("utf-8", "backslashreplace").decode()


def _same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


def _json_type(value: object) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
