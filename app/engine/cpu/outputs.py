"""The output of a step on the CPU: tokens drawn from logits, and hidden states summed for embeddings.

Log-probabilities are the model's own, before penalties and temperature. Every row of logits is computed alone, and
pooled rows are added in order, so no sequence changes another's output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import ForwardOutput, PoolingBatch, SamplingBatch
from app.engine.logits import adjust, is_changed, largest, overflowed_rows, rank_of
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.pooling.cpu import add_rows
from app.kernels.sampling.cpu import log_sum_exp, row_maximum, sample_rows


def sample(logits: NDArray[np.float32], sampling: SamplingBatch, team: ThreadTeam) -> ForwardOutput:
    """Draw one token per row. logits: [P, V] float32, overwritten where a row has penalties, a bias or a mask."""
    num_rows = logits.shape[0]
    tokens, normalisers = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float64)
    logprobs = np.zeros(num_rows, np.float32)
    wants_logprob = sampling.num_logprobs >= 0
    changed = [p for p in range(num_rows) if is_changed(sampling, p)]
    originals = {p: logits[p].copy() for p in changed if wants_logprob[p]}
    for p in changed:
        adjust(logits[p], sampling, p)
    if num_rows:
        masks = sampling.masks
        of_row = np.full(num_rows, -1, np.int32) if masks is None else masks.of_row
        words = np.zeros((0, 0), np.uint32) if masks is None else masks.words()
        team.run(
            sample_rows, 1, logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
            sampling.seeds, sampling.positions, wants_logprob, of_row, words, tokens, normalisers,
        )  # fmt: skip
    overflowed = overflowed_rows(logits, tokens)
    targets, ranks = sampling.targets, None
    if targets is not None:
        tokens, ranks = np.where(targets >= 0, targets, tokens), np.zeros(num_rows, np.int32)
        overflowed = tuple(sorted({*overflowed, *overflowed_rows(logits, tokens)}))
    top: list[tuple[NDArray[np.int32], NDArray[np.float32]] | None] = [None] * num_rows
    for p in np.flatnonzero(wants_logprob).tolist():
        row, normaliser = logits[p], float(normalisers[p])
        if p in originals:
            row = originals[p]
            normaliser = float(log_sum_exp(row, row_maximum(row)[0]))
        logprobs[p] = np.float64(row[tokens[p]]) - normaliser
        if ranks is not None and targets is not None and targets[p] >= 0:
            ranks[p] = rank_of(row, int(tokens[p]))
        count = int(sampling.num_logprobs[p])
        if count:
            top[p] = largest(row, count, normaliser)
    return ForwardOutput(tokens, logprobs, tuple(top), overflowed, ranks=ranks)


def one_row() -> SamplingBatch:
    """A row that every kernel of `sample` works on, for a warm-up."""
    one, single = np.zeros(1, np.int32), np.ones(1, np.float32)
    return SamplingBatch(
        temperature=single, top_p=single, top_k=one, min_p=0 * single, presence=single, frequency=single,
        repetition=single, seeds=np.zeros(1, np.uint64), positions=np.zeros(1, np.int64), num_logprobs=one,
        history=(one,), prompt_lens=one,
    )  # fmt: skip


def compile_sampling() -> None:
    """Compile the kernels of `sample`, whose rows of logits are wider than the vocabulary."""
    team = ThreadTeam(1)
    try:
        sample(np.zeros((1, 128), np.float32)[:, :64], one_row(), team)
    finally:
        team.close()


def sample_resized(
    logits: NDArray[np.float32],
    vocab_sizes: NDArray[np.int64],
    appended: Callable[[int], NDArray[np.float32]],
    sampling: SamplingBatch,
    team: ThreadTeam,
) -> ForwardOutput:
    """`sample` where some rows have more tokens than the base's V, or fewer. logits: [P, V]; vocab_sizes: [P];
    appended: the further logits of a row with more tokens.

    Rows of one size are drawn together, from a copy.
    """
    num_rows, num_base = logits.shape
    token_ids, logprobs = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float32)
    top: list[tuple[NDArray[np.int32], NDArray[np.float32]] | None] = [None] * num_rows
    ranks = None if sampling.targets is None else np.zeros(num_rows, np.int32)
    overflowed: list[int] = []
    for size in np.unique(vocab_sizes).tolist():
        rows = np.flatnonzero(vocab_sizes == size)
        own = np.empty((len(rows), size), np.float32)
        own[:, :num_base] = logits[rows, :size]
        for index, row in enumerate(rows.tolist() if size > num_base else ()):
            own[index, num_base:] = appended(row)
        output = sample(own, sampling.take(rows), team)
        token_ids[rows], logprobs[rows] = output.token_ids, output.logprobs
        if ranks is not None and output.ranks is not None:
            ranks[rows] = output.ranks
        for index, row in enumerate(rows.tolist()):
            top[row] = output.top_logprobs[index]
        overflowed += rows[list(output.overflowed)].tolist()
    return ForwardOutput(token_ids, logprobs, tuple(top), tuple(sorted(overflowed)), ranks=ranks)


def rows_of(pooling: PoolingBatch | None) -> NDArray[np.int32]:
    """[N] int32: the rows of all ranges, one range after the other."""
    if pooling is None:
        return np.zeros(0, np.int32)
    return np.concatenate([np.arange(first, end, dtype=np.int32) for first, end in pooling.ranges])


def with_sums(
    output: ForwardOutput, states: NDArray[np.float32], pooling: PoolingBatch | None, team: ThreadTeam
) -> ForwardOutput:
    """`output` with the sums of states [N, H], the rows that `rows_of` names."""
    if pooling is None:
        return output
    ends = np.cumsum(pooling.ranges[:, 1] - pooling.ranges[:, 0])
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    return replace(output, sums=add_pooled_rows(states, np.stack([starts, ends], axis=1), pooling.sums, team))


def add_pooled_rows(
    states: NDArray[np.float32], ranges: NDArray[np.int64], sums: NDArray[np.float64], team: ThreadTeam
) -> NDArray[np.float64]:
    """The sums [Q, H] plus the rows of their ranges [Q, 2] of states [N, H]."""
    total = sums.copy()
    team.run(add_rows, 1, states, ranges, total)
    return total
