"""The batch builder: a `Schedule`'s items as one frozen `ForwardBatch`.

Items arrive sorted by adapter slot. Nothing is kept between steps except sampling parameters, which are reused while
the same sequences sample in the same order (steady decoding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import ForwardBatch, PoolingBatch, SamplingBatch, TokenMasks
from app.engine.models.spec import Pooling
from app.engine.sequence import Sequence

_NO_HISTORY: NDArray[np.int32] = np.empty(0, np.int32)
_NO_HISTORY.flags.writeable = False


class BatchBuilder:
    """Builds one batch per step for a block size."""

    def __init__(self, block_size: int, masks: Callable[[list[Sequence]], TokenMasks | None] | None = None) -> None:
        """masks: starts computing the masks of the sequences that sample; None without structured output."""
        self._block_size = block_size
        self._masks = masks
        self._sampled: list[Sequence] = []
        self._constants = _SamplingConstants([])

    def build(self, items: list[tuple[Sequence, int]]) -> ForwardBatch:
        """The arrays of a step: `count` tokens of each sequence from `num_computed` on, draft tokens included."""
        block_size = self._block_size
        num_blocks = max(sequence.num_blocks for sequence, _ in items)
        block_tables = np.zeros((len(items), num_blocks), np.int32)  # [B, N]
        token_ids: list[int] = []
        positions: list[int] = []
        kv_slots: list[int] = []
        seq_lens: list[int] = []
        sample_rows: list[int] = []
        sample_seqs: list[int] = []
        sampled: list[Sequence] = []  # per row
        drawing: list[Sequence] = []
        scored: list[tuple[int, int, int, int]] = []  # row of the sampled ones, position, target and num_logprobs
        pooled: list[Sequence] = []
        pooled_ranges: list[tuple[int, int]] = []
        runs = _Runs()
        num_tokens = 0
        for index, (sequence, count) in enumerate(items):
            start = sequence.num_computed
            end = start + count
            table = sequence.block_table
            block_tables[index, : sequence.num_blocks] = table[: sequence.num_blocks]
            if count == 1 and sequence.has_memory:  # the common case, without an array
                token_ids.append(sequence.token_ids.item(start))
                positions.append(start)
                kv_slots.append(table.item(start // block_size) * block_size + start % block_size)
            else:
                token_ids += sequence.token_ids[start:end].tolist()
                positions += range(start, end)
                if sequence.has_memory:
                    kv_slots += _kv_slots(table, np.arange(start, end), block_size)
            seq_lens.append(end)
            runs.add(sequence, start, end, num_tokens)
            num_tokens += count
            if sequence.pooling is not None:
                first, last = pooled_range(sequence.pooling.method, sequence.num_tokens, start, end)
                pooled.append(sequence)
                pooled_ranges.append((num_tokens - end + first, num_tokens - end + last))
                continue
            for token in sequence.scored_tokens(start, end):
                target, number = sequence.token_ids.item(token + 1), _num_prompt_logprobs(sequence)
                scored.append((len(sample_rows), token + 1, target, number))
                sample_rows.append(num_tokens - end + token)
                sample_seqs.append(index)
            if end - sequence.num_draft_tokens == sequence.num_tokens:
                num_rows = 1 + sequence.num_draft_tokens
                sample_rows += range(num_tokens - num_rows, num_tokens)
                sample_seqs += [index] * num_rows
                sampled += [sequence] * num_rows
                drawing.append(sequence)
        sampling = self._sampling(sampled, drawing)
        if scored:
            sampling = _with_scored(sampling, scored, len(sample_rows))
        query_starts = np.cumsum([0, *(count for _, count in items)], dtype=np.int32)  # [B+1]
        return ForwardBatch(
            token_ids=np.array(token_ids, np.int32), positions=np.array(positions, np.int32),
            kv_slots=np.array(kv_slots, np.int64), query_starts=query_starts, seq_lens=np.array(seq_lens, np.int32),
            block_tables=block_tables, run_starts=np.array([*runs.starts, num_tokens], np.int32),
            run_adapter_slots=np.array(runs.adapter_slots, np.int32), sample_rows=np.array(sample_rows, np.int32),
            sample_seqs=np.array(sample_seqs, np.int32), sampling=sampling,
            pooling=_pooling(pooled, pooled_ranges),
        )  # fmt: skip

    def _sampling(self, sampled: list[Sequence], drawing: list[Sequence]) -> SamplingBatch:
        if sampled != self._sampled:
            self._sampled = sampled
            self._constants = _SamplingConstants(sampled)
        constants = self._constants
        nums_known = [n for s in drawing for n in range(s.num_tokens, s.num_tokens + s.num_draft_tokens + 1)]  # [P]
        history = constants.no_history
        if constants.any_history:
            history = tuple(
                sequence.token_ids[:num_known] if sequence.wants_history else _NO_HISTORY
                for sequence, num_known in zip(sampled, nums_known, strict=True)
            )
        return SamplingBatch(
            temperature=constants.temperature, top_p=constants.top_p, top_k=constants.top_k, min_p=constants.min_p,
            presence=constants.presence, frequency=constants.frequency, repetition=constants.repetition,
            seeds=constants.seeds, positions=np.array(nums_known, np.int64), num_logprobs=constants.num_logprobs,
            history=history, prompt_lens=constants.prompt_lens,
            biases=tuple(map(Sequence.bias_after, sampled, nums_known)) if constants.any_bias else (),
            masks=None if self._masks is None else self._masks(drawing),
        )  # fmt: skip


def _num_prompt_logprobs(sequence: Sequence) -> int:
    number = sequence.request.sampling.prompt_logprobs
    assert number is not None, "only such prompts are scored"
    return number


def _with_scored(sampling: SamplingBatch, scored: list[tuple[int, int, int, int]], num_rows: int) -> SamplingBatch:
    """`sampling` of rows that draw, and between them greedy rows with a target: (row, position, target, number of
    log-probabilities)."""
    rows, at, targets, nums_logprobs = (np.array(each, np.int64) for each in zip(*scored, strict=True))
    draws = np.setdiff1d(np.arange(num_rows), rows)

    def spread(values: NDArray[Any], default: float = 0) -> NDArray[Any]:
        found = np.full(num_rows, default, values.dtype)
        found[draws] = values
        return found

    num_logprobs, positions = spread(sampling.num_logprobs), spread(sampling.positions)
    all_targets = np.full(num_rows, -1, np.int32)
    num_logprobs[rows], positions[rows], all_targets[rows] = nums_logprobs, at, targets
    place_of = {int(row): place for place, row in enumerate(draws)}
    history = tuple(sampling.history[place_of[row]] if row in place_of else _NO_HISTORY for row in range(num_rows))
    biases = sampling.biases
    if biases:
        biases = tuple(biases[place_of[row]] if row in place_of else None for row in range(num_rows))
    masks = sampling.masks
    return SamplingBatch(
        temperature=spread(sampling.temperature), top_p=spread(sampling.top_p, 1), top_k=spread(sampling.top_k),
        min_p=spread(sampling.min_p), presence=spread(sampling.presence), frequency=spread(sampling.frequency),
        repetition=spread(sampling.repetition, 1), seeds=spread(sampling.seeds), positions=positions,
        num_logprobs=num_logprobs, history=history, prompt_lens=spread(sampling.prompt_lens),
        biases=biases,
        masks=None if masks is None else TokenMasks(spread(masks.of_row, -1), masks.words), targets=all_targets,
    )  # fmt: skip


def _kv_slots(table: NDArray[np.int32], positions: NDArray[np.int64], block_size: int) -> list[int]:
    slots: list[int] = (table[positions // block_size].astype(np.int64) * block_size + positions % block_size).tolist()
    return slots


class _Runs:
    """Runs of a step's tokens with one adapter each: their starts and slots."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.adapter_slots: list[int] = []

    def add(self, sequence: Sequence, start: int, end: int, num_tokens: int) -> None:
        """Add tokens `start` to `end` of a sequence after `num_tokens` others; before its adapter's activation they are
        the base's."""
        activated = min(max(sequence.adapter_start, start), end)
        if start < activated:
            self._continue(num_tokens, 0)
        if activated < end:
            self._continue(num_tokens + activated - start, sequence.adapter_slot)

    def _continue(self, first: int, adapter_slot: int) -> None:
        """Tokens from `first` on have this adapter: a new run, unless the last run has the same one."""
        if not self.adapter_slots or self.adapter_slots[-1] != adapter_slot:
            self.starts.append(first)
            self.adapter_slots.append(adapter_slot)


def _pooling(pooled: list[Sequence], ranges: list[tuple[int, int]]) -> PoolingBatch | None:
    """`ranges`: the rows of the step that count for each pooled sequence."""
    if not pooled:
        return None
    return PoolingBatch(np.array(ranges, np.int64), np.stack([sequence.pooled_sums for sequence in pooled]))


class _SamplingConstants:
    """The arrays of a `SamplingBatch` that do not change while the same sequences sample."""

    def __init__(self, sampled: list[Sequence]) -> None:
        params = [sequence.request.sampling for sequence in sampled]
        self.temperature = np.array([p.temperature for p in params], np.float32)
        self.top_p = np.array([p.top_p for p in params], np.float32)
        self.top_k = np.array([p.top_k for p in params], np.int32)
        self.min_p = np.array([p.min_p for p in params], np.float32)
        self.presence = np.array([p.presence_penalty for p in params], np.float32)
        self.frequency = np.array([p.frequency_penalty for p in params], np.float32)
        self.repetition = np.array([p.repetition_penalty for p in params], np.float32)
        self.seeds = np.array([p.seed for p in params], np.uint64)
        self.num_logprobs = np.array([-1 if p.num_logprobs is None else p.num_logprobs for p in params], np.int32)
        self.prompt_lens = np.array([sequence.num_prompt for sequence in sampled], np.int32)
        self.any_bias = any(p.logit_bias or p.min_tokens for p in params)
        self.any_history = any(sequence.wants_history for sequence in sampled)
        self.no_history = (_NO_HISTORY,) * len(sampled)


def pooled_range(method: Pooling, num_tokens: int, start: int, end: int) -> tuple[int, int]:
    """The pooled tokens among `start` to `end` of a sequence of `num_tokens`: first and end, equal for none."""
    match method:
        case "mean":
            return start, end
        case "last":
            return max(start, num_tokens - 1), max(end, num_tokens - 1)
        case "cls":
            return start, max(start, min(end, 1))
