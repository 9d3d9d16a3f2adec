"""Sampling: greedy tokens come from the program, the others are drawn on the host.

Logits leave the device only if a row needs more than its most likely token. Log-probabilities are the model's own,
before penalties and temperature. Rows are independent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import ForwardOutput, SamplingBatch
from app.engine.logits import adjust, allowed_tokens, is_changed, largest, rank_of
from app.engine.xla.arrays import StepResult
from app.kernels.sampling.reference import draw, log_sum_exp


def sample(result: StepResult, sampling: SamplingBatch) -> ForwardOutput:
    """One token for each of the P sampled rows; rows beyond P are padding."""
    num_rows = len(sampling.temperature)
    tokens, top_logits = np.array(result.token_ids)[:num_rows], np.asarray(result.top)[:num_rows]
    # The maximum of a row with a NaN is NaN: nothing can be drawn from it.
    lost = tuple(np.flatnonzero(~np.isfinite(top_logits)).tolist())
    logprobs = np.zeros(num_rows, np.float32)
    top: list[tuple[NDArray[np.int32], NDArray[np.float32]] | None] = [None] * num_rows
    masks = sampling.masks
    changed = np.array([is_changed(sampling, p) for p in range(num_rows)], bool)
    drawn = [p for p in np.flatnonzero((sampling.temperature > 0) | changed).tolist() if p not in lost]
    logprob_rows = [p for p in np.flatnonzero(sampling.num_logprobs >= 0).tolist() if p not in lost]
    targets = sampling.targets
    ranks = None if targets is None else np.zeros(num_rows, np.int32)
    if drawn or logprob_rows:
        logits = np.asarray(result.logits)
        for p in drawn:
            row = logits[p]
            if changed[p]:
                row = row.copy()
                adjust(row, sampling, p)
                if masks is not None and masks.of_row[p] >= 0:
                    row[~allowed_tokens(masks.words()[masks.of_row[p]], len(row))] = -np.inf
            tokens[p] = draw(
                row, float(sampling.temperature[p]), int(sampling.top_k[p]), float(sampling.top_p[p]),
                float(sampling.min_p[p]), int(sampling.seeds[p]), int(sampling.positions[p]),
            )  # fmt: skip
        if targets is not None:
            tokens = np.where(targets >= 0, targets, tokens)
        for p in logprob_rows:
            normaliser = log_sum_exp(logits[p])
            logprobs[p] = np.float64(logits[p, tokens[p]]) - normaliser
            if ranks is not None and targets is not None and targets[p] >= 0:
                ranks[p] = rank_of(logits[p], int(tokens[p]))
            if sampling.num_logprobs[p] > 0:
                top[p] = largest(logits[p], int(sampling.num_logprobs[p]), normaliser)
    return ForwardOutput(tokens, logprobs, tuple(top), lost, ranks=ranks)
