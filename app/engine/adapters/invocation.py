"""Where an activated LoRA begins: at the last occurrence of its invocation in the prompt.

In: a prompt and an adapter's invocation, as token ids. Out: the index of the first token that the adapter changes, or
None. Rule: what is generated is never searched. This is PEFT's `calculate_alora_offsets`, which `generate` calls once,
with the prompt (Greenewald et al. 2025, https://arxiv.org/abs/2504.12397): a prompt without the invocation is answered
by the base alone, though the answer contain it; it needs no adapter, and takes no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def invocation_start(prompt: NDArray[np.int32], invocation: Sequence[int]) -> int | None:
    """prompt: [n]. The index at which the last whole occurrence of `invocation` begins; None if there is none."""
    num_places = len(prompt) - len(invocation) + 1
    if num_places <= 0:
        return None
    is_match = np.ones(num_places, np.bool_)
    for offset, token_id in enumerate(invocation):
        is_match &= prompt[offset : offset + num_places] == token_id
    places = np.flatnonzero(is_match)
    return int(places[-1]) if len(places) else None


def is_activated(prompt: Sequence[int], invocation: Sequence[int]) -> bool:
    """Whether an adapter with this invocation, () for an ordinary one, is needed to answer a prompt."""
    return not invocation or invocation_start(np.asarray(prompt, np.int32), invocation) is not None
