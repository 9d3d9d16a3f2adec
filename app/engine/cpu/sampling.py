"""From logits to tokens: penalties, biases, masks, the draw, log-probabilities.

In: logits [P, V] float32 and a `SamplingBatch`. Out: a `ForwardOutput`. Log-probabilities are the model's
own, before penalties and temperature. Everything is per row: no row can see another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import ForwardOutput, SamplingBatch
from app.engine.logits import adjust, is_changed, largest, overflowed
from app.kernels.machine.team import Team
from app.kernels.sampling.cpu import log_sum_exp, row_maximum, sample_rows


def sample(logits: NDArray[np.float32], sampling: SamplingBatch, team: Team) -> ForwardOutput:
    """Draw one token per row. logits: [P, V] float32, overwritten where a row has penalties, a bias or a mask."""
    num_rows = logits.shape[0]
    tokens, normalisers = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float64)
    logprobs = np.zeros(num_rows, np.float32)
    wanted = sampling.num_logprobs >= 0
    changed = [p for p in range(num_rows) if is_changed(sampling, p)]
    originals = {p: logits[p].copy() for p in changed if wanted[p]}
    for p in changed:
        adjust(logits[p], sampling, p)
    if num_rows:
        masks = sampling.masks
        of_row = np.full(num_rows, -1, np.int32) if masks is None else masks.of_row
        words = np.zeros((0, 0), np.uint32) if masks is None else masks.words()
        team.run(
            sample_rows, 1, logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
            sampling.seeds, sampling.positions, wanted, of_row, words, tokens, normalisers,
        )  # fmt: skip
    top: list[tuple[NDArray[np.int32], NDArray[np.float32]] | None] = [None] * num_rows
    for p in np.flatnonzero(wanted).tolist():
        row, normaliser = logits[p], float(normalisers[p])
        if p in originals:
            row = originals[p]
            normaliser = float(log_sum_exp(row, row_maximum(row)[0]))
        logprobs[p] = np.float64(row[tokens[p]]) - normaliser
        count = int(sampling.num_logprobs[p])
        if count:
            top[p] = largest(row, count, normaliser)
    return ForwardOutput(tokens, logprobs, tuple(top), overflowed(logits, tokens))
