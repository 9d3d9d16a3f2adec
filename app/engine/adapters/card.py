"""Names and facts of an adapter, without its weights.

An `AdapterRef` is what travels with a request; an `AdapterCard` is what a list of adapters shows.
Identity is `digest`, the hash of the contents; names are for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.wire_format import message


@message
@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One generation of a named adapter. `digest` is hex SHA-256 of the canonical contents."""

    name: str
    digest: str
    tenant_id: str
    generation: int = 1
    uri: str = ""


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """Facts about an adapter's contents.

    `max_rank` is the largest rank over its modules in decoder layers, at least 1: the number of rank
    rows it needs before rounding up. `targets` are module names ("q_proj", ...), sorted. `size_bytes` is its weights'
    size in host memory; `extra_bytes` is what it holds on a device beside its rank rows (`extra_bytes`
    in `app.engine.adapters.extra_weights`). `text` is `AdapterTokenizer` as JSON, "" for an adapter whose prompts are the base's.
    `invocation_tokens`: the token ids from whose last occurrence in a prompt on the adapter is applied (activated LoRA,
    `invocation_start`), () for one that is applied to all. `metadata` is what a card file says of the
    adapter beside its description (version, author, …): a JSON object of texts, "" for none.
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


def invocation_start(prompt: NDArray[np.int32], invocation: Sequence[int]) -> int | None:
    """prompt: [n]. The index at which the last whole occurrence of `invocation` begins; None if there is none.

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
    """Whether an adapter with this invocation, () for an ordinary one, is needed to answer a prompt.

    A prompt without the invocation is answered by the base alone, even if the answer contains it; it takes no rows.
    """
    return not invocation or invocation_start(np.asarray(prompt, np.int32), invocation) is not None
