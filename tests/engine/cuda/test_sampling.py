"""Tokens drawn on a device are those of the definition, row by row; so are log-probabilities and lists of tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from app.engine.batch import Bias, ForwardOutput, SamplingBatch, TokenMasks
from app.engine.cuda.sampling import sample as sample_with
from app.engine.logits import adjust, allowed_tokens, largest
from app.kernels.sampling.reference import draw, log_sum_exp
from load_tests.engine.steps import greedy
from tests.engine.cuda.gpu import DEVICE, FORM, KERNELS
from tests.seeds import rng

VOCAB = 1500


def sample(logits: torch.Tensor, batch: SamplingBatch) -> ForwardOutput:
    return sample_with(logits, batch, KERNELS[FORM].exp)


def _batch(generator: np.random.Generator, count: int) -> SamplingBatch:
    def pick(*values: float) -> np.ndarray:
        return generator.choice(np.array(values), count)

    prompt_lens = generator.integers(0, 20, count).astype(np.int32)
    history = tuple(
        generator.integers(0, VOCAB, int(n + generator.integers(1, 30))).astype(np.int32)
        if generator.integers(2)
        else np.empty(0, np.int32)
        for n in prompt_lens
    )
    return SamplingBatch(
        temperature=pick(0, 0.3, 1, 1.7).astype(np.float32),
        top_p=pick(1, 0.9, 0.3, 1e-6).astype(np.float32),
        top_k=pick(0, 1, 7, 300, VOCAB + 5).astype(np.int32),
        min_p=pick(0, 0, 0.05).astype(np.float32),
        presence=pick(0, 0.5).astype(np.float32),
        frequency=pick(0, 0.25).astype(np.float32),
        repetition=pick(1, 1.3).astype(np.float32),
        seeds=generator.integers(0, 2**64, count, dtype=np.uint64),
        positions=generator.integers(0, 2**40, count),
        num_logprobs=pick(-1, 0, 1, 5).astype(np.int32),
        history=history,
        prompt_lens=prompt_lens,
        biases=tuple(_bias(generator) if generator.integers(3) == 0 else None for _ in range(count)),
        masks=_masks(generator, count),
    )


def _bias(generator: np.random.Generator) -> Bias:
    ids = generator.choice(VOCAB, 20, replace=False).astype(np.int64)
    amounts = generator.choice([-100.0, -1.5, 2.0, 100.0, -np.inf], 20).astype(np.float32)
    return Bias(ids, amounts)


def _masks(generator: np.random.Generator, count: int) -> TokenMasks:
    """For two rows of three, of few tokens and of nearly all; token 0, which no bias forbids, among them."""
    masked = np.flatnonzero(np.arange(count) % 3)
    of_row = np.full(count, -1, np.int32)
    of_row[masked] = np.arange(len(masked))
    allowed = generator.random((len(masked), -(-VOCAB // 32) * 32)) < generator.choice([0.01, 0.9], (len(masked), 1))
    allowed[:, :30] = True
    allowed[:, VOCAB:] = False
    words = np.packbits(allowed, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    return TokenMasks(of_row, lambda: words)


def _logits(generator: np.random.Generator, count: int) -> np.ndarray:
    """Half of the rows have many equal values, some of them a maximum that is not unique."""
    logits = generator.normal(0, 4, (count, VOCAB)).astype(np.float32)
    logits[::2] = np.round(logits[::2])
    return logits


def test_tokens_and_logprobs_are_those_of_the_definition() -> None:
    generator = rng()
    count = 200
    logits, batch = _logits(generator, count), _batch(generator, count)
    given = logits.copy()
    output = sample(torch.from_numpy(logits).to(DEVICE), batch)
    np.testing.assert_array_equal(logits, given)
    different = 0
    for p in range(count):
        row = logits[p].copy()
        adjust(row, batch, p)
        if batch.masks is not None and batch.masks.of_row[p] >= 0:
            row[~allowed_tokens(batch.masks.words()[batch.masks.of_row[p]], VOCAB)] = -np.inf
        expected = draw(
            row, batch.temperature[p], int(batch.top_k[p]), float(batch.top_p[p]), float(batch.min_p[p]),
            int(batch.seeds[p]), int(batch.positions[p]),
        )  # fmt: skip
        token = int(output.token_ids[p])
        different += token != expected
        wanted = int(batch.num_logprobs[p])
        normaliser = log_sum_exp(logits[p])
        if wanted < 0:
            assert output.logprobs[p] == 0
        else:
            assert output.logprobs[p] == pytest.approx(logits[p, token] - normaliser, abs=2e-6)
        if wanted < 1:
            assert output.top_logprobs[p] is None
        else:
            top = output.top_logprobs[p]
            assert top is not None
            ids, values = largest(logits[p], wanted, normaliser)
            np.testing.assert_array_equal(top[0], ids)
            np.testing.assert_allclose(top[1], values, rtol=0, atol=2e-6)
    # An exponential may differ in its last bit: a draw that falls on such an edge is one in millions.
    assert different <= 1


def test_a_row_is_drawn_as_if_it_were_alone() -> None:
    generator = rng()
    logits, batch = _logits(generator, 40), _batch(generator, 40)
    together = sample(torch.from_numpy(logits).to(DEVICE), batch)
    for p in range(40):
        names = [field.name for field in dataclasses.fields(SamplingBatch) if field.name not in ("masks", "targets")]
        parts = {name: getattr(batch, name)[p : p + 1] for name in names}
        assert batch.masks is not None
        if (of_row := batch.masks.of_row[p : p + 1])[0] >= 0:
            parts["masks"] = TokenMasks(of_row, batch.masks.words)
        alone = sample(torch.from_numpy(logits[p : p + 1]).to(DEVICE), SamplingBatch(**parts))
        assert alone.token_ids[0] == together.token_ids[p]
        assert alone.logprobs[0] == together.logprobs[p]
        mine, theirs = alone.top_logprobs[0], together.top_logprobs[p]
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            np.testing.assert_array_equal(mine[0], theirs[0])
            np.testing.assert_array_equal(mine[1], theirs[1])


def test_draws_follow_the_distribution() -> None:
    """A seed and a position each: the frequencies of 20,000 draws are near the probabilities."""
    count, vocab = 20_000, 8
    generator = rng()
    row = generator.normal(0, 1, vocab).astype(np.float32)
    batch = dataclasses.replace(
        greedy(count),
        temperature=np.ones(count, np.float32),
        seeds=generator.integers(0, 2**64, count, dtype=np.uint64),
        positions=np.arange(count),
    )
    tokens = sample(torch.from_numpy(np.tile(row, (count, 1))).to(DEVICE), batch).token_ids
    expected = np.exp(row - log_sum_exp(row))
    assert np.abs(np.bincount(tokens, minlength=vocab) / count - expected).max() < 0.02


def test_no_rows_draw_nothing() -> None:
    output = sample(torch.zeros(0, 10, device=DEVICE), greedy(0))
    assert output.token_ids.shape == (0,)
    assert output.top_logprobs == ()


def test_rows_with_a_target_report_its_log_probability_and_rank() -> None:
    generator = rng()
    logits, batch = _logits(generator, 40), _batch(generator, 40)
    targets = generator.integers(-1, logits.shape[1], 40).astype(np.int32)
    batch = dataclasses.replace(batch, targets=targets, num_logprobs=np.zeros(40, np.int32))
    without = sample(torch.from_numpy(logits).to(DEVICE), dataclasses.replace(batch, targets=None))
    output = sample(torch.from_numpy(logits).to(DEVICE), batch)
    assert output.ranks is not None
    for p, target in enumerate(targets.tolist()):
        if target < 0:
            assert (output.token_ids[p], output.ranks[p]) == (without.token_ids[p], 0)
            continue
        assert output.token_ids[p] == target
        assert output.ranks[p] == 1 + (logits[p] > logits[p, target]).sum()
        assert abs(output.logprobs[p] - (logits[p, target] - log_sum_exp(logits[p]))) < 2e-6 * max(
            1, abs(logits[p]).max()
        )
