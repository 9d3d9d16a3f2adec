"""The parts of sampling that every backend shares: penalties, biases, masks and top log-probabilities.

NumPy in and out, one row at a time: no row can see another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import Bias, SamplingBatch


class Penalties(NamedTuple):
    """The penalties of one row: logits of `seen` tokens are divided by `repetition` (or multiplied, below zero), then
    `amounts` are subtracted from those of `generated` tokens. Ids are distinct, [n] int64; amounts [n] float32."""

    seen: NDArray[np.int64]
    repetition: np.float32
    generated: NDArray[np.int64]
    amounts: NDArray[np.float32]


def penalties(sampling: SamplingBatch, p: int) -> Penalties:
    """The penalties of sampled row p: repetition (Keskar et al. 2019, over prompt and output), presence and frequency
    (OpenAI, over output)."""
    history, prompt_len = sampling.history[p], int(sampling.prompt_lens[p])
    repetition = sampling.repetition[p]
    seen = np.unique(history) if repetition != 1.0 else history[:0]
    generated, counts = np.unique(history[prompt_len:], return_counts=True)
    amounts = sampling.presence[p] + sampling.frequency[p] * counts.astype(np.float32)
    return Penalties(seen.astype(np.int64), repetition, generated.astype(np.int64), amounts.astype(np.float32))


def penalise(row: NDArray[np.float32], sampling: SamplingBatch, p: int) -> None:
    """Apply sampled row p's penalties to its logits [V] in place."""
    own = penalties(sampling, p)
    values = row[own.seen]
    row[own.seen] = np.where(values > 0, values / own.repetition, values * own.repetition)
    row[own.generated] -= own.amounts


def is_changed(sampling: SamplingBatch, p: int) -> bool:
    """Whether row p samples from other logits than the model's."""
    has_mask = sampling.masks is not None and sampling.masks.of_row[p] >= 0
    return has_mask or sampling.history[p].size > 0 or bias_of(sampling, p) is not None


def bias_of(sampling: SamplingBatch, p: int) -> Bias | None:
    """The bias of sampled row p."""
    return sampling.biases[p] if sampling.biases else None


def adjust(row: NDArray[np.float32], sampling: SamplingBatch, p: int) -> None:
    """Apply sampled row p's penalties, then its bias, to its logits [V] in place."""
    if sampling.history[p].size:
        penalise(row, sampling, p)
    bias = bias_of(sampling, p)
    if bias is not None:
        row[bias.ids] += bias.amounts


def allowed_tokens(words: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """A mask as truth values [V], from its words [W]."""
    return np.unpackbits(words.astype("<u4").view(np.uint8), count=vocab_size, bitorder="little").astype(np.bool_)


def largest(row: NDArray[np.float32], count: int, normaliser: float) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The `count` most likely tokens, most likely first, ties to the smaller id, and their log-probabilities."""
    count = min(count, row.shape[0])
    threshold = np.partition(row, row.shape[0] - count)[row.shape[0] - count]
    candidates = np.flatnonzero(row >= threshold)
    order = np.lexsort((candidates, -row[candidates].astype(np.float64)))[:count]
    ids = candidates[order]
    return ids.astype(np.int32), (row[ids].astype(np.float64) - normaliser).astype(np.float32)


def rank_of(row: NDArray[np.float32], token_id: int) -> int:
    """1 for a row's most likely token; one more for each token that is more likely than this one."""
    return 1 + int(np.count_nonzero(row > row[token_id]))


def overflowed_rows(logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> tuple[int, ...]:
    """Rows of `logits` [P, V] whose chosen token has an infinite or NaN logit. token_ids: [P]. Reads P values."""
    is_finite = np.isfinite(logits[np.arange(len(token_ids)), token_ids])
    return () if is_finite.all() else tuple(np.flatnonzero(~is_finite).tolist())
