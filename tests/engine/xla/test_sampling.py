"""What the host makes of a step's logits in the CPU form."""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.batch import SamplingBatch
from app.engine.xla.arrays import Outcome
from app.engine.xla.sampling import sample


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_logprobs", [-1, 2])
def test_rows_that_overflowed_are_named(temperature: float, num_logprobs: int) -> None:
    num_rows = 4
    logits = np.random.default_rng(3).normal(size=(num_rows + 2, 20)).astype(np.float32)
    expected = logits[:num_rows].argmax(axis=1)
    logits[1:3] = np.nan
    ones, zeros = np.ones(num_rows, np.float32), np.zeros(num_rows, np.int32)
    sampling = SamplingBatch(
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
    output = sample(Outcome(None, logits), sampling)
    assert output.overflowed == (1, 2)
    if not temperature:
        assert output.token_ids[[0, 3]].tolist() == expected[[0, 3]].tolist()
