"""The arrays between the engine and a backend: one `ForwardBatch` per step.

All NumPy, all frozen; a backend copies what it keeps. Letters: T tokens in the step, B sequences, N blocks in the
longest table, G runs of tokens with one adapter, P rows that draw a token. Tokens of one sequence are consecutive, and
sequences with equal adapters are neighbours; the tokens before an activated adapter's invocation are a run of the base
model between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Bias(NamedTuple):
    """An addition to a row's logits. Ids are distinct, [n] int64; amounts [n] float32; -inf forbids a token."""

    ids: NDArray[np.int64]
    amounts: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that the M rows with a grammar may draw, at least one each.

    of_row: [P] int32, the mask of each row, -1 for none. `words()`: [M, W] uint32, bit i of a row, lowest first, is
    token i; it waits until the masks are computed.
    """

    of_row: NDArray[np.int32]
    words: Callable[[], NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the P rows that draw a token, in order.

    temperature, top_p, min_p, presence, frequency, repetition: [P] float32. top_k: [P] int32, 0 is off. seeds: [P]
    uint64. positions: [P] int64, the position of the token to draw, prompt included: the counter of the random
    generator. num_logprobs: [P] int32, -1 for none, 0 for the chosen token only. history: for rows with a penalty the
    token ids so far [n] int32, else an empty array; prompt_lens: [P] int32, how many of them are prompt. biases: [P],
    or () where no row has one; masks: None where no row has one. targets: [P], the prompt token that follows a row,
    whose log-probability is computed instead of drawing one; -1 for rows that draw; None where all do. The order is
    penalties, biases, masks, temperature, filters.
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    min_p: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    repetition: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]
    num_logprobs: NDArray[np.int32]
    history: tuple[NDArray[np.int32], ...]
    prompt_lens: NDArray[np.int32]
    biases: tuple[Bias | None, ...] = ()
    masks: TokenMasks | None = None
    targets: NDArray[np.int32] | None = None

    def take(self, rows: NDArray[np.int64]) -> SamplingBatch:
        """The parameters of some rows."""
        masks = self.masks
        return SamplingBatch(
            temperature=self.temperature[rows], top_p=self.top_p[rows], top_k=self.top_k[rows], min_p=self.min_p[rows],
            presence=self.presence[rows], frequency=self.frequency[rows], repetition=self.repetition[rows],
            seeds=self.seeds[rows], positions=self.positions[rows], num_logprobs=self.num_logprobs[rows],
            history=tuple(self.history[row] for row in rows), prompt_lens=self.prompt_lens[rows],
            biases=tuple(self.biases[row] for row in rows) if self.biases else (),
            masks=None if masks is None else TokenMasks(masks.of_row[rows], masks.words),
            targets=None if self.targets is None else self.targets[rows],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolingBatch:
    """The Q sequences of a step whose hidden states are summed, in order.

    ranges: [Q, 2] int64, the first and end row of T of each. sums: [Q, H] float64, the sums of earlier steps.
    """

    ranges: NDArray[np.int64]
    sums: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's work.

    token_ids: [T] int32. positions: [T] int32. kv_slots: [T] int64, where each token's K and V go: block * block_size +
    offset. query_starts: [B+1] int32, prefix sums of tokens per sequence. seq_lens: [B] int32, keys visible to the last
    query of the sequence, itself included (query i of a sequence with q queries sees seq_len - q + i + 1).
    block_tables: [B, N] int32, unused entries 0. run_starts: [G+1] int32 and run_adapter_slots: [G] int32 cover all T
    tokens; slot 0 is the base, and neighbouring runs differ. A sequence has at most one run of its adapter, at its end
    (activated LoRA). sample_rows: [P] int32, rows of T whose next token is drawn, ascending: a sequence's last row, or
    its last ones if draft tokens are verified (`BackendLimits.num_draft_rows`); sample_seqs: [P] int32, the sequence of
    each. pooling: None where nothing is embedded. An encoder has no KV memory: kv_slots and block_tables are empty, and
    every sequence is complete.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    kv_slots: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    run_starts: NDArray[np.int32]
    run_adapter_slots: NDArray[np.int32]
    sample_rows: NDArray[np.int32]
    sample_seqs: NDArray[np.int32]
    sampling: SamplingBatch
    pooling: PoolingBatch | None = None


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """token_ids: [P] int32; the target of a row that has one. logprobs: [P] float32 of these tokens (0 where not
    requested). ranks: [P] int32 of targets, 1 for the most likely token, or None without targets.

    top_logprobs: per row (ids [k] int32, logprobs [k] float32) in descending order, or None. overflowed: rows whose
    largest logit or that of the chosen token is not finite, ascending; checked by backends whose logits are in the
    host's memory. sums: [Q, H] float64, `PoolingBatch.sums` plus the rows of this step, or None without pooling.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_logprobs: tuple[tuple[NDArray[np.int32], NDArray[np.float32]] | None, ...]
    overflowed: tuple[int, ...] = ()
    sums: NDArray[np.float64] | None = None
    ranks: NDArray[np.int32] | None = None
