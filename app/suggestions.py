""" "Did you mean …?" suggestions for unknown keys. Only close matches are suggested; a wrong one is worse than none."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

#: Required similarity of two words, from 0 to 1.
_ALIKE = 0.7
_MAX_CHARS = 80
#: Shorter parts such as `n` end too many words to be a hint.
_MIN_CHARS_OF_A_PART = 4
_STEM = 4
#: Parts that say too little about a setting to be compared.
_COMMON = frozenset({"max", "min", "num", "per", "s", "ms", "adapter", "adapters", "lora"})


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'; did you mean ...?', or an empty string."""
    names = sorted(known)
    same = [name for name in names if name.rpartition(".")[2] == word]  # in another section
    if same:
        return f"; did you mean {' or '.join(map(repr, same))}?"
    near = difflib.get_close_matches(word[:_MAX_CHARS], names, n=1, cutoff=_ALIKE)
    part_of = [name for name in names if word in name.split("_")]
    if not near and len(part_of) == 1:
        near = part_of
    near = near or _most_words(word, names)
    last = word.rpartition("_")[2]
    if not near and len(last) >= _MIN_CHARS_OF_A_PART and last in names:  # other servers' lora_name and lora_path
        near = [last]
    return f"; did you mean {near[0]!r}?" if near else ""


def _most_words(word: str, names: Iterable[str]) -> list[str]:
    """The one name that has more of the word's parts than any other, and at least half of them; else nothing."""
    parts = set(word.split("_")) - _COMMON
    scores = {name: sum(_part_score(part, name.split("_")) for part in parts) for name in names if "." not in name}
    best = max(scores.values(), default=0.0)
    found = [name for name in scores if scores[name] == best]
    return found if len(found) == 1 and best and 2 * best >= len(parts) and len(word) <= _MAX_CHARS else []


def _part_score(part: str, others: Iterable[str]) -> float:
    """1 for an equal part, less for one with the same stem (cache, caching)."""
    if len(part) < _MIN_CHARS_OF_A_PART:
        return 0.0
    if part in others:
        return 1.0
    return 0.75 if len(part) > _STEM and any(part[:_STEM] == other[:_STEM] for other in others) else 0.0


def complaints(error: ValidationError, model: type[BaseModel], whole: str) -> str:
    """What is wrong with a file that has the fields of `model`. `whole` is the place of what concerns all of it."""
    lines = []
    for item in error.errors():
        *above, last = item["loc"] or (whole,)
        where = ".".join(map(str, [*above, last]))
        if item["type"] == "extra_forbidden":
            lines.append(f"{where} is an unknown key{did_you_mean(str(last), settings_at(model, above))}")
        else:
            lines.append(f"{where}: {item['msg']}")
    return "; ".join(lines)


def settings_at(model: type[BaseModel], path: Sequence[int | str]) -> set[str]:
    """The fields at `path` inside a model, and the dotted fields of their models."""
    here = fields_at(model, path)
    return here | {f"{field}.{inner}" for field in here for inner in fields_at(model, (*path, field))}


def fields_at(model: type[BaseModel], path: Sequence[int | str]) -> set[str]:
    """The fields at `path` (keys and indices) inside a model; empty if there is no model."""
    inner: type[BaseModel] | None = model
    for part in path:
        if inner is None or isinstance(part, int):
            continue
        field = inner.model_fields.get(part)
        inner = None if field is None else model_in(field.annotation)
    return set() if inner is None else set(inner.model_fields)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in a field's annotation, also if it is optional, annotated or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, list, tuple):
        return next((found for part in typing.get_args(annotation) if (found := model_in(part))), None)
    return None
