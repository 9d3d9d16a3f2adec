"""Base class and validation of request bodies.

One rule holds at every level of a request: a field that could change the result is implemented or rejected by its name,
and one that cannot (`ignored_fields`, null, an empty list or object) is accepted and reported in the response header
`X-Polylora-Ignored`. Like with OpenAI, null means absent for every optional field at any depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from app.deployments.ingress.schemas.ignored_fields import REASONS, Ignored
from app.engine.errors import InvalidRequest, UnsupportedField
from app.redaction import holds_key
from app.suggestions import did_you_mean, fields_at

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
    #: Fields that are accepted and ignored (`ignored_fields`).
    ignored: ClassVar[Ignored] = {}
    #: Where these objects are in an inference request, for the header of ignored fields ("messages"). None: not in an
    #: inference request; only those ignore fields.
    location: ClassVar[str | None] = None
    #: Whether a request without a body counts as `{}`.
    may_be_empty: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, value: object, info: ValidationInfo) -> object:
        fields, required = _field_names(cls)
        if not isinstance(value, dict) or (value.keys() <= fields and None not in value.values()):
            return value
        left: dict[str, Any] = {}
        has_unknown = False
        for name, item in value.items():
            if name in fields:
                if item is not None or name in required:
                    left[name] = item
            elif _is_ignored(cls, name, item):
                if isinstance(info.context, set) and len(info.context) < _MAX_REPORTED:
                    info.context.add(f"{cls.location}.{name}" if cls.location else name)
            elif not has_unknown:  # one is enough to reject the body: reporting 300,000 takes seconds
                left[name] = item
                has_unknown = True
        return left


def union_by_type(*kinds: type[Body], default: type[Body] | None = None) -> Any:
    """The annotation of an object that is one of these bodies, by its `type`; `default` if it has none.

    Only the chosen body checks the object, so that errors and ignored fields are those of its own type.
    """
    names = {value: kind.__name__ for kind in kinds for value in get_args(kind.model_fields["type"].annotation)}

    def name_of(value: object) -> str | None:
        if isinstance(value, Body):
            return type(value).__name__
        given = value.get("type") if isinstance(value, dict) else value
        if given is None:
            return None if default is None else default.__name__
        return names.get(given) if isinstance(given, str) else None

    message = f"its type must be one of {', '.join(names)}; no other is implemented here"
    tagged: Any = Union[tuple(Annotated[kind, Tag(kind.__name__)] for kind in kinds)]  # noqa: UP007
    return Annotated[tagged, Discriminator(name_of, custom_error_type="unknown_type", custom_error_message=message)]


def _is_ignored(kind: type[Body], name: str, value: object) -> bool:
    if value is None:
        return True
    if kind.location is None:
        return False
    accepted = kind.ignored.get(name, ())
    return accepted is None or any(_same(value, item) for item in accepted) or value in ([], {})


#: Most names of ignored fields that a request's header lists.
_MAX_REPORTED = 50
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")
IGNORED_HEADER = "X-Polylora-Ignored"


def ignored_header(names: Iterable[str]) -> str:
    """The value of `X-Polylora-Ignored`: the names in order, without those that a header cannot contain."""
    return ", ".join(sorted(name for name in names if _PLAIN_NAME.fullmatch(name)))


@cache
def _field_names(kind: type[Body]) -> tuple[frozenset[str], frozenset[str]]:
    """(all field names, required ones), by alias. Cached: a request may contain 100,000 bodies."""
    named = {field.alias or name: field for name, field in kind.model_fields.items()}
    return frozenset(named), frozenset(name for name, field in named.items() if field.is_required())


BodyT = TypeVar("BodyT", bound=Body)


def ignored_fields_schema(kind: type[Body]) -> dict[str, Any]:
    """JSON schemas of the fields that a body accepts and ignores."""
    return {
        name: {"description": "Accepted and ignored."}
        if values is None
        else {"enum": list(values), "description": "Not implemented; accepted at these values."}
        for name, values in sorted(kind.ignored.items())
        if name not in _field_names(kind)[0]
    }


def parse_body(kind: type[BodyT], value: object, ignored: set[str] | None = None) -> BodyT:
    """Check a decoded JSON value against `kind`. Raises UnsupportedField or InvalidRequest naming the field.

    `ignored` collects the names of the fields that were accepted and ignored.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_json_type(value)}")
    for name, item in value.items():
        if name not in kind.model_fields and not _is_ignored(kind, name, item):
            raise UnsupportedField(_refusal(kind, name), param=_quotable(name))
    try:
        return kind.model_validate(value, context=ignored)
    except ValidationError as error:
        raise _invalid(kind, error) from error


def _refusal(kind: type[Body], name: str) -> str:
    reason = f": {REASONS[name]}" if name in REASONS else ""
    is_inference = kind.location is not None
    if is_inference and (allowed := kind.ignored.get(name)):
        values = " or ".join(json.dumps(value) for value in allowed)
        return f"{name!r} is not implemented here{reason}; leave it out or send {values}"
    if is_inference and reason:
        return f"{name!r} is not implemented here{reason}"
    guess = did_you_mean(name, kind.model_fields)
    if is_inference and name in ADAPTER_WORDS:
        field = "model" if "model" in kind.model_fields else "lora_path"
        guess = f"; name the adapter in {field!r}"
    if is_inference:
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
    if first["type"] == "unknown_type":  # of `union_by_type`
        path.append("type")
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
