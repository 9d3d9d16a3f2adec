"""What the host makes of a step's results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.engine.batch import Bias, SamplingBatch, TokenMasks
from app.engine.xla.arrays import StepResult
from app.engine.xla.sampling import sample
from app.kernels.sampling.reference import log_sum_exp


def _sampling(num_rows: int, temperature: float, num_logprobs: int) -> SamplingBatch:
    ones, zeros = np.ones(num_rows, np.float32), np.zeros(num_rows, np.int32)
    return SamplingBatch(
        temperature=ones * np.float32(temperature),
        top_p=ones,
        top_k=zeros,
        min_p=0 * ones,
        presence=0 * ones,
        frequency=0 * ones,
        repetition=ones,
        seeds=np.zeros(num_rows, np.uint64),
        positions=np.zeros(num_rows, np.int64),
        num_logprobs=zeros + num_logprobs,
        history=(zeros[:0],) * num_rows,
        prompt_lens=zeros,
    )


def _result(logits: np.ndarray) -> StepResult:
    token_ids = logits.argmax(axis=1).astype(np.int32)
    return StepResult(token_ids, logits[np.arange(len(logits)), token_ids], logits)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_logprobs", [-1, 2])
@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_rows_that_overflowed_are_named(temperature: float, num_logprobs: int, lost: float) -> None:
    num_rows = 4
    logits = np.random.default_rng(3).normal(size=(num_rows + 2, 20)).astype(np.float32)
    expected = logits[:num_rows].argmax(axis=1)
    logits[1:3, 5] = lost
    output = sample(_result(logits), _sampling(num_rows, temperature, num_logprobs))
    assert output.overflowed == (1, 2)
    if not temperature:
        assert output.token_ids[[0, 3]].tolist() == expected[[0, 3]].tolist()


def test_logits_leave_the_device_only_when_a_row_asks_for_them() -> None:
    logits = np.random.default_rng(3).normal(size=(6, 20)).astype(np.float32)

    class Guarded:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise AssertionError("nobody asked")

    result = _result(logits)._replace(logits=Guarded())
    assert sample(result, _sampling(4, 0.0, -1)).token_ids.tolist() == logits[:4].argmax(axis=1).tolist()
    with pytest.raises(AssertionError, match="nobody asked"):
        sample(result, _sampling(4, 0.7, -1))


def test_logprobs_are_the_models_own() -> None:
    logits = np.random.default_rng(3).normal(size=(3, 20)).astype(np.float32)
    output = sample(_result(logits), _sampling(2, 0.0, 2))
    for p in range(2):
        expected = logits[p].max() - log_sum_exp(logits[p])
        assert abs(output.logprobs[p] - expected) < 1e-6
        top = output.top_logprobs[p]
        assert top is not None
        assert top[0].tolist() == np.argsort(-logits[p])[:2].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_with_a_mask_or_a_bias_draws_among_what_it_allows(temperature: float) -> None:
    """The log-probability is the model's own, of all tokens."""
    logits = np.random.default_rng(3).normal(size=(3, 40)).astype(np.float32)
    words = np.zeros((1, 2), np.uint32)
    words[0, 1] = 0b110
    bias = Bias(np.arange(39), np.full(39, -np.inf, np.float32))
    plain = _sampling(3, temperature, 0)
    sampling = replace(
        plain, masks=TokenMasks(np.array([-1, 0, -1], np.int32), lambda: words), biases=(None, None, bias)
    )
    output, free = sample(_result(logits), sampling), sample(_result(logits), plain)
    assert output.token_ids[0] == free.token_ids[0]
    assert output.token_ids[1] in (33, 34)
    assert output.token_ids[2] == 39
    for p in range(3):
        own = logits[p, output.token_ids[p]] - log_sum_exp(logits[p])
        assert abs(output.logprobs[p] - own) < 1e-6
