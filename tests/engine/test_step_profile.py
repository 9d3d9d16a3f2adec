"""Of steps with known times the adapters' part is found, and nothing is lost or counted twice."""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.meter import StepProfile


def test_what_adapters_take_is_found_from_steps_that_differ() -> None:
    rng = np.random.default_rng(0)
    split, lora_s, total_s = StepProfile(), 0.0, 0.0
    for index in range(4096):
        tokens, adapters = int(rng.integers(1, 65)), int(rng.integers(0, 9))
        rows, token_rows = 16 * adapters, 16 * tokens * (adapters > 0)
        deltas = 5e-5 * rows + 2e-6 * token_rows
        time_s = (0.01 + 0.001 * tokens + deltas) * rng.uniform(0.95, 1.05)
        split.observe(tokens, rows, token_rows, time_s)
        total_s += time_s
        lora_s += deltas
        assert split.base_s + split.lora_s == pytest.approx(total_s), index
    assert split.lora_s == pytest.approx(lora_s, rel=0.15)


def test_steps_without_adapters_are_the_bases() -> None:
    split = StepProfile()
    for _ in range(256):
        split.observe(4, 0, 0, 0.01)
    assert (split.base_s, split.lora_s) == (pytest.approx(2.56), 0.0)


def test_steps_that_are_all_alike_are_the_bases() -> None:
    split = StepProfile()
    for _ in range(256):
        split.observe(4, 16, 64, 0.01)
    assert (split.base_s, split.lora_s) == (pytest.approx(2.56), 0.0)


def test_adapters_that_cost_nothing_take_no_negative_part() -> None:
    rng = np.random.default_rng(2)
    split = StepProfile()
    for _ in range(1024):
        tokens, adapters = int(rng.integers(1, 65)), int(rng.integers(0, 9))
        split.observe(tokens, 16 * adapters, 16 * tokens * (adapters > 0), 0.01 + 0.001 * tokens - 2e-5 * adapters)
    assert split.base_s > 0
    assert 0 <= split.lora_s < 0.02 * split.base_s
