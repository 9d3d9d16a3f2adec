"""The page of settings, from the pydantic models and from Ray Serve's schemas."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.config import AppConfig
from app.deployments.placement.autoscaling import Objective
from docs.generators.markdown import table

ROOT = Path(__file__).parents[2]

_RAY_INTRO = """
## Ray Serve's part of the file

Replicas, resources and autoscaling are Ray Serve's own settings, beside `args:` in the same file. The ones that matter
here are listed; Ray's documentation has the rest.
"""
_RAY_FIELDS = {
    "http_options": ("HTTPOptionsSchema", ("host", "port")),
    "deployments[]": (
        "DeploymentSchema",
        ("name", "num_replicas", "ray_actor_options", "user_config", "autoscaling_config", "max_replicas_per_node"),
    ),
    "deployments[].autoscaling_config": (
        "AutoscalingConfig",
        ("min_replicas", "max_replicas", "target_ongoing_requests", "look_back_period_s", "upscale_delay_s",
         "downscale_delay_s", "downscale_to_zero_delay_s", "policy"),
    ),
}  # fmt: skip
_POLICIES = "app.deployments.placement.policies"


def settings_page() -> str:
    """Every setting of `args:`, then what is documented of Ray Serve's own, then the options of policies."""
    parts = ["# Settings\n\n", _settings_intro()]
    for place, model in _sections(AppConfig, ""):
        parts.append(f"## {place}\n\n{_summary(model)}\n\n")
        rows = ((f"`{name}`", _type(field), _default(field), field.description or "") for name, field in _own(model))
        parts.append(table(("setting", "type", "default", "description"), rows) + "\n")
    parts.append(_RAY_INTRO.lstrip() + "\n")
    for place, (model_name, names) in _RAY_FIELDS.items():
        fields = _ray_model(model_name).model_fields
        rows = (
            (f"`{name}`", "" if name == "policy" else _ray_default(fields[name]), _first_sentence(fields[name]))
            for name in names
        )
        parts.append(f"### {place}\n\n{table(('setting', 'default', 'description'), rows)}\n")
    parts.append("### Options of the autoscaling policy\n\n`policy_kwargs` of `AdapterDemand`; ")
    parts.append("[autoscaling and placement](../how-to/autoscale.md) says what they do.\n\n")
    parts.append(_dataclass_table(Objective) + "\n## Options of placement policies\n\n")
    parts.append("`placement.policy_options`, by `placement.policy`.\n\n")
    parts.append(table(("policy", "option", "default"), _policy_options()))
    return "".join(parts)


def _settings_intro() -> str:
    return (
        "One file configures a service: a Ray Serve application file. These are the settings of its `args:` section.\n"
        "An unknown key is an error. [Configure](../how-to/configure.md) explains the file.\n\n"
    )


def _sections(model: type[BaseModel], place: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted place, model) of a model's sections and of theirs, in their order."""
    if place:
        yield place, model
    for name, field in model.model_fields.items():
        for inner, suffix in _models(field.annotation, ""):
            yield from _sections(inner, f"{place}.{name}{suffix}".removeprefix("."))


def _own(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """Fields that are no section of their own."""
    return [
        (name, field)
        for name, field in model.model_fields.items()
        if not any(suffix == "" for _, suffix in _models(field.annotation, ""))
    ]


def _models(annotation: Any, suffix: str) -> Iterator[tuple[type[BaseModel], str]]:
    """Models inside an annotation; the suffix says whether it is a list of them or a mapping by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, suffix
    arguments = typing.get_args(annotation)
    inner = {tuple: "[]", list: "[]", dict: ".{name}"}.get(typing.get_origin(annotation) or object, "")
    for argument in arguments:
        yield from _models(argument, suffix + inner)


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{word} {value:,.0f}" if value == int(value) else f"{word} {value:g}"
        for constraint in field.metadata
        for name, word in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"), ("multiple_of", "multiple of"))
        if (value := getattr(constraint, name, None)) is not None
    ]
    return ", ".join([_type_name(field.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(each) for each in arguments if each is not type(None))
    if origin in (tuple, list):
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type_name(arguments[0])} to {_type_name(arguments[1])}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "anything"}
    return names.get(annotation) or f"`{annotation.__name__}`"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        value: Any = field.default_factory()  # type: ignore[call-arg]
    elif field.default is PydanticUndefined:
        return "required"
    else:
        value = field.default
    return _value(value)


def _value(value: Any) -> str:
    if isinstance(value, BaseModel) or value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"`{value}` ({value >> 30} GiB)" if value % (1 << 30) == 0 else f"`{value}` ({value >> 20} MiB)"
    if isinstance(value, tuple | list | dict):
        return f"`{json.dumps(value)}`" if value else "empty"
    return f"`{value}`" if value != "" else "empty"


def _summary(model: type) -> str:
    return (model.__doc__ or "").strip().partition("\n")[0]


def _ray_model(name: str) -> Any:
    from ray.serve import config, schema

    return getattr(schema, name, None) or getattr(config, name)


def _ray_default(field: FieldInfo) -> str:
    value = field.default
    unset = value is PydanticUndefined or value is None or "DEFAULT" in str(value)
    return "" if unset else _value(int(value) if isinstance(value, float) and value.is_integer() else value)


def _first_sentence(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    return re.split(r"(?<=\.) ", text)[0].replace("``", "`")


def _dataclass_table(kind: Any) -> str:
    return table(("option", "default"), ((f"`{f.name}`", f"`{f.default}`") for f in dataclasses.fields(kind)))


def _policy_options() -> Iterator[tuple[str, str, str]]:
    for path in sorted((ROOT / "app/deployments/placement/policies").glob("[a-z]*.py")):
        options = importlib.import_module(f"{_POLICIES}.{path.stem}").Policy.Options
        fields = options.model_fields.items() if issubclass(options, BaseModel) else ()
        if not dataclasses.is_dataclass(options) and not fields:
            yield f"`{path.stem}`", "", ""
        for name, field in fields:
            yield f"`{path.stem}`", f"`{name}`", _default(field)
        for each in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
            yield f"`{path.stem}`", f"`{each.name}`", _value(each.default)
