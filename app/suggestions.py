"""What somebody may have meant who wrote a word that is not known.

In: the word, and the words that are. Out: half a sentence for the end of a message, or nothing. Rule: a guess is said
only where it is close; a wrong one is worse than none.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

#: How alike two words have to be, from 0 to 1.
_ALIKE = 0.7
_MAX_CHARS = 80
#: `n` and the like are the end of too many words to say anything.
_MIN_CHARS_OF_A_PART = 4


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
    last = word.rpartition("_")[2]
    if not near and len(last) >= _MIN_CHARS_OF_A_PART and last in names:  # other servers' lora_name and lora_path
        near = [last]
    return f"; did you mean {near[0]!r}?" if near else ""


def settings_at(model: type[BaseModel], path: Sequence[int | str]) -> set[str]:
    """The fields of what lies at `path` inside a model, and with dots between them the fields of these."""
    here = fields_at(model, path)
    return here | {f"{field}.{inner}" for field in here for inner in fields_at(model, (*path, field))}


def fields_at(model: type[BaseModel], path: Sequence[int | str]) -> set[str]:
    """The fields of what lies at `path` (keys and indices) inside a model; none where that is no model."""
    inner: type[BaseModel] | None = model
    for part in path:
        if inner is None or isinstance(part, int):
            continue
        field = inner.model_fields.get(part)
        inner = None if field is None else model_in(field.annotation)
    return set() if inner is None else set(inner.model_fields)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, however it is wrapped: optional, annotated, in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, list, tuple):
        return next((found for part in typing.get_args(annotation) if (found := model_in(part))), None)
    return None
