"""Sampling on a device: penalties, biases, masks, draws and log-probabilities of all rows together.

The draw is that of `app.kernels.sampling.reference` with one change: probabilities are rounded to integers before they
are summed, so a sum has one value in any order of additions, and rows are independent. Uniform numbers come from the
same counter. Log-probabilities are the model's own, before penalties and temperature. Only what the host needs leaves
the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.batch import ForwardOutput, SamplingBatch
from app.engine.logits import bias_of, penalties
from app.kernels.sampling.reference import uniform

Exp = Callable[[Tensor], Tensor]

#: Sums of 2**18 probabilities below one fit into 62 bits; larger vocabularies take a coarser unit.
_SUM_BITS, _MAX_UNIT_BITS = 62, 44


def sample(logits: Tensor, sampling: SamplingBatch, exp: Exp = torch.exp) -> ForwardOutput:
    """Draw one token per row. logits: [P, V] float32, on any device, not modified. exp: see `Kernels`."""
    num_rows = logits.shape[0]
    logprobs = np.zeros(num_rows, np.float32)
    top: list[tuple[NDArray[np.int32], NDArray[np.float32]] | None] = [None] * num_rows
    if not num_rows:
        return ForwardOutput(np.zeros(0, np.int32), logprobs, ())
    scores = _apply_masks(_apply_biases(_apply_penalties(logits, sampling), logits, sampling), logits, sampling)
    tokens = scores.argmax(-1)  # the first of equals
    drawn = np.flatnonzero(sampling.temperature != 0)
    if len(drawn):
        rows = _upload(drawn, logits.device)
        tokens[rows] = _draw(scores[rows], sampling, drawn, exp)
    targets, ranks = sampling.targets, None
    if targets is not None:
        tokens = torch.where(
            _upload(targets >= 0, logits.device), _upload(targets.astype(np.int64), logits.device), tokens
        )
        ranks = np.zeros(num_rows, np.int32)
    logprob_rows = np.flatnonzero(sampling.num_logprobs >= 0)
    if len(logprob_rows):
        rows = _upload(logprob_rows, logits.device)
        own = logits[rows]
        normalisers = _log_sum_exp(own, exp)  # [W] float64
        values_of = own.gather(1, tokens[rows, None])
        chosen = values_of[:, 0].cpu().numpy()
        if ranks is not None and targets is not None:
            found = 1 + (own > values_of).sum(-1).cpu().numpy()
            ranks[logprob_rows] = np.where(targets[logprob_rows] >= 0, found, 0)
        logprobs[logprob_rows] = (chosen - normalisers).astype(np.float32)
        most = min(int(sampling.num_logprobs.max()), logits.shape[1])
        if most:
            ids = _largest(own, most)
            values = (own.gather(1, ids).cpu().numpy() - normalisers[:, None]).astype(np.float32)
            host_ids = ids.cpu().numpy().astype(np.int32)
            for at, p in enumerate(logprob_rows.tolist()):
                count = int(sampling.num_logprobs[p])
                if count:
                    top[p] = host_ids[at, :count], values[at, :count]
    return ForwardOutput(tokens.cpu().numpy().astype(np.int32), logprobs, tuple(top), ranks=ranks)


def _apply_penalties(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """A copy with the rows' penalties applied, or the logits themselves if there are none."""
    rows = [p for p in range(len(sampling.history)) if sampling.history[p].size]
    if not rows:
        return logits
    logits = logits.clone()
    own = [penalties(sampling, p) for p in rows]
    row_of_seen = np.repeat(rows, [len(o.seen) for o in own])
    if len(row_of_seen):
        where = tuple(_upload(part, logits.device) for part in (row_of_seen, np.concatenate([o.seen for o in own])))
        factor = _upload(np.repeat([o.repetition for o in own], [len(o.seen) for o in own]), logits.device)
        values = logits[where]
        logits[where] = torch.where(values > 0, values / factor, values * factor)
    row_of_generated = np.repeat(rows, [len(o.generated) for o in own])
    if len(row_of_generated):
        ids = np.concatenate([o.generated for o in own])
        where = tuple(_upload(part, logits.device) for part in (row_of_generated, ids))
        logits[where] -= _upload(np.concatenate([o.amounts for o in own]), logits.device)
    return logits


def _apply_biases(scores: Tensor, logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Add the rows' biases, to a copy if the scores are still the logits."""
    own = [(p, bias) for p in range(len(sampling.biases)) if (bias := bias_of(sampling, p)) is not None]
    if not own:
        return scores
    scores = scores.clone() if scores is logits else scores
    rows = np.repeat([p for p, _ in own], [len(bias.ids) for _, bias in own])
    where = tuple(_upload(part, logits.device) for part in (rows, np.concatenate([bias.ids for _, bias in own])))
    scores[where] += _upload(np.concatenate([bias.amounts for _, bias in own]), logits.device)
    return scores


def _apply_masks(scores: Tensor, logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Set tokens that the rows' masks forbid to -inf, in a copy if the scores are still the logits."""
    masks = sampling.masks
    if masks is None:
        return scores
    scores = scores.clone() if scores is logits else scores
    rows = np.flatnonzero(masks.of_row >= 0)
    words = _upload(masks.words()[masks.of_row[rows]].view(np.int32), logits.device)  # [M, W]
    shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()  # [M, V]
    where = _upload(rows, logits.device)
    scores[where] = scores[where].masked_fill(~allowed, -math.inf)
    return scores


def _draw(logits: Tensor, sampling: SamplingBatch, rows: NDArray[np.intp], exp: Exp) -> Tensor:
    """[R] token ids for logits [R, V] of the sampled rows `rows`, all with temperature above 0."""
    device, vocab = logits.device, logits.shape[1]

    def column(values: NDArray[np.generic]) -> Tensor:
        return _upload(values, device)[:, None]

    top_k, top_p = sampling.top_k[rows], sampling.top_p[rows]
    inverse = np.float32(1.0) / sampling.temperature[rows]
    p = exp((logits - logits.amax(-1, keepdim=True)) * column(inverse))
    floor = column(sampling.min_p[rows])
    limited = (top_k > 0) & (top_k < vocab)
    if limited.any() or (top_p < 1).any():
        ordered = p.sort(-1, descending=True).values
        k = np.where(limited, top_k, vocab).astype(np.int64)
        cutoff = torch.where(column(limited), ordered.gather(1, column(k - 1)), 0.0)
        candidates = torch.where(ordered >= cutoff, _units(ordered), 0).cumsum(-1)  # [R, V]
        needed = torch.ceil(candidates[:, -1:].double() * column(top_p.astype(np.float64))).long()
        last = (ordered >= cutoff).sum(-1, keepdim=True) - 1
        place = torch.minimum((candidates < needed).sum(-1, keepdim=True), last)
        nucleus = torch.where(column(top_p < 1), ordered.gather(1, place), 0.0)
        floor = torch.maximum(torch.maximum(floor, cutoff), nucleus)
    cumulative = torch.where(p >= floor, _units(p), 0).cumsum(-1)
    mass = cumulative[:, -1:]
    draws = [uniform(int(sampling.seeds[row]), int(sampling.positions[row])) for row in rows]
    target = torch.minimum((mass.double() * column(np.array(draws))).long(), mass - 1)
    return (cumulative <= target).sum(-1)


def _units(p: Tensor) -> Tensor:
    """Numbers from 0 to 1 as int64 counts, fine enough that the rounding does not affect a draw."""
    return (p.double() * _one(p.shape[1])).round().long()


def _one(vocab_size: int) -> float:
    """The count that stands for 1."""
    return float(1 << min(_MAX_UNIT_BITS, _SUM_BITS - (vocab_size - 1).bit_length()))


def _log_sum_exp(logits: Tensor, exp: Exp) -> NDArray[np.float64]:
    """log(sum(exp(row))) [R], on the host."""
    top = logits.amax(-1, keepdim=True)
    sums = _units(exp(logits - top)).sum(-1)
    one = _one(logits.shape[1])
    logs = [math.log(total / one) for total in sums.tolist()]  # one by one: NumPy's may depend on the place
    return top[:, 0].cpu().numpy().astype(np.float64) + np.array(logs)


def _largest(logits: Tensor, count: int) -> Tensor:
    """[R, count] ids of the largest logits, largest first, ties to the smaller id."""
    bits = (logits + 0.0).contiguous().view(torch.int32).long()  # + 0.0: one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered * (1 << 32) - ids).topk(count, -1).indices


def _upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)
