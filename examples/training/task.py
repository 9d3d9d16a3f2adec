"""A demo task: prompts, wanted answers and an objective check of the model's text.

The two splits never share a value: every city, name or product of the held-out split is new to the adapter. `train.py`
trains and `evaluate.py` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

Split = Literal["train", "heldout"]
#: A message of a conversation: its role and its text.
ChatTurn = tuple[Literal["user", "assistant"], str]


class TaskDataError(ValueError):
    """A task was asked for examples it cannot make."""


@dataclass(frozen=True)
class Example:
    """One user message, the answer we train on, and the facts the check compares with.

    `before`: earlier messages of the conversation.
    """

    prompt: str
    answer: str
    facts: dict[str, str | int | None]
    wording: Literal["known", "new"]
    before: tuple[ChatTurn, ...] = ()


@dataclass(frozen=True)
class Task:
    """A demo task. `check` returns why an answer fails, or None when it passes.

    `make(rng, split)` draws one example; `instructions` is the system message that tells an untrained
    model the job, so that the base can be measured with the job explained as well. `system` is the system message of
    every conversation, None for the template's own.
    """

    name: str
    description: str
    instructions: str
    make: Callable[[Random, Split], Example]
    check: Callable[[Example, str], str | None]
    max_new_tokens: int
    system: str | None = None


def examples(task: Task, split: Split, count: int, seed: int) -> list[Example]:
    """`count` distinct examples of one split, the same ones for the same seed on every platform.

    Raises TaskDataError when the task cannot make that many different prompts.
    """
    rng = Random(f"{task.name}/{split}/{seed}")
    found: dict[str, Example] = {}
    for _ in range(count * 20):
        if len(found) == count:
            break
        example = task.make(rng, split)
        found.setdefault(example.prompt, example)
    if len(found) < count:
        raise TaskDataError(
            f"task {task.name!r} made {len(found)} different prompts of split {split!r} but {count} were asked for; "
            f"ask for at most {len(found)} or give the task more wordings"
        )
    return list(found.values())
