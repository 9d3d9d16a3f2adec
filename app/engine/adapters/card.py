"""Names and facts of an adapter, without its weights.

An `AdapterRef` travels with a request; an `AdapterCard` describes the contents. The `digest` of the contents is the
identity; names are for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.wire_format import message

#: PEFT's key for the name of the base model that an adapter was trained on, also in `AdapterCard.metadata`.
TRAINED_ON = "base_model_name_or_path"


@message
@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One generation of a named adapter. `digest` is the hex SHA-256 of the canonical contents."""

    name: str
    digest: str
    tenant_id: str
    generation: int = 1
    uri: str = ""


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """Facts about an adapter's contents.

    `max_rank`: the largest rank over its modules in decoder layers, at least 1: the rank rows it needs, before rounding
    up. `targets`: module names ("q_proj", …), sorted. `size_bytes`: its weights in host memory. `extra_bytes`: device
    memory besides its rank rows (`app.engine.adapters.extra_weights.extra_bytes`). `text`: its `AdapterTokenizer` as
    JSON, "" if prompts are written as for the base. `invocation_tokens`: the adapter applies from their last occurrence
    in a prompt (activated LoRA, `invocation_start`); () for an ordinary adapter. `metadata`: a card file's free
    metadata (version, author, …), for a PEFT folder the base model that it names (`TRAINED_ON`), as a JSON object of
    strings, "" for none. `is_zero`: it changes nothing, so it is the base model under another name. `has_score_head`:
    it scores texts and generates none (`score_head`). `vocab_size`: the rows of its embedding and output matrices where
    they were resized; 0: as many as the base's.
    """

    digest: str
    base_digest: str
    max_rank: int
    targets: tuple[str, ...]
    dtype: str
    size_bytes: int
    description: str = ""
    extra_bytes: int = 0
    text: str = ""
    invocation_tokens: tuple[int, ...] = ()
    metadata: str = ""
    is_zero: bool = False
    has_score_head: bool = False
    vocab_size: int = 0


def invocation_start(prompt: NDArray[np.int32], invocation: Sequence[int]) -> int | None:
    """The index at which the last complete occurrence of `invocation` in prompt [n] begins; None if there is none.

    This is PEFT's `calculate_alora_offsets`, which `generate` calls once, with the prompt (Greenewald et al. 2025,
    https://arxiv.org/abs/2504.12397): generated tokens are never searched.
    """
    num_places = len(prompt) - len(invocation) + 1
    if num_places <= 0:
        return None
    is_match = np.ones(num_places, np.bool_)
    for offset, token_id in enumerate(invocation):
        is_match &= prompt[offset : offset + num_places] == token_id
    places = np.flatnonzero(is_match)
    return int(places[-1]) if len(places) else None


def is_activated(prompt: Sequence[int], invocation: Sequence[int]) -> bool:
    """Whether a prompt needs an adapter with this invocation; () is an ordinary adapter, which always applies.

    A prompt without the invocation is answered by the base alone, even if the answer contains it; it takes no rows.
    """
    return not invocation or invocation_start(np.asarray(prompt, np.int32), invocation) is not None
