"""Answers with a schema are valid, and the same bits alone and in batches, over every kind of adapter.

`tests.engine.batch_invariance` says which batches. Every answer that has ended is checked by jsonschema.
"""

from __future__ import annotations

import pytest

from app.engine.config import CpuConfig
from app.engine.cpu.backend import CpuBackend
from tests.budgets import Budget
from tests.engine.batch_invariance import disturbed

#: Each round is 40 requests alone and some 180 in batches.
BUDGET_S, MIN_ROUNDS = 3, 1


def _rounds(at_least: int, seconds: float) -> int:
    budget, count = Budget(seconds), 0
    while budget.is_left() or count < at_least:
        assert disturbed(CpuBackend, CpuConfig(weight_dtype="float32"), structured=1.0)[0] > 0
        count += 1
    return count


def test_answers_follow_their_schemas_with_the_same_bits_in_any_batch() -> None:
    assert _rounds(MIN_ROUNDS, BUDGET_S) >= MIN_ROUNDS


@pytest.mark.nightly
def test_ten_thousand_answers_follow_their_schemas_with_the_same_bits_in_any_batch() -> None:
    rounds = _rounds(46, 0)
    assert rounds * (40 + 8 * 22) > 9_900
