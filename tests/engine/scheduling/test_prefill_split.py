"""Shares of a step's prefill tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.engine.scheduling.prefill_split import MIN_SHARE, spend_rest, split_prefill
from app.engine.sequence import Sequence
from tests.fakes import fake_request, fake_spec


def prompt(tokens: int, tenant_id: str) -> Sequence:
    return Sequence(fake_request("r", [1] * tokens, tenant_id=tenant_id), None, fake_spec(), 8)


_prompts = st.lists(st.builds(prompt, st.integers(1, 200), st.sampled_from("abc")), max_size=8)


@given(_prompts, st.integers(0, 300), st.sets(st.sampled_from("abcd")))
def test_the_budget_is_kept_and_spent(prompts: list[Sequence], budget: int, waiting: set[str]) -> None:
    counts = split_prefill(prompts, budget, waiting)
    assert sum(counts) <= budget
    if prompts and budget:
        assert counts[0] > 0, "the oldest always goes on"
    spend_rest(prompts, counts, budget - sum(counts))
    assert sum(counts) == min(budget, sum(each.num_pending for each in prompts))
    assert all(0 <= count <= each.num_pending for count, each in zip(counts, prompts, strict=True))


def test_tenants_get_equal_shares_and_the_oldest_of_one_at_most_half() -> None:
    prompts = [prompt(500, "a"), prompt(500, "a"), prompt(500, "b")]
    assert split_prefill(prompts, 128, set()) == [32, 32, 64]
    assert split_prefill(prompts, 120, {"c"}) == [20, 20, 40]
    assert split_prefill(prompts, 120, {"b"}) == [30, 30, 30]
    assert split_prefill(prompts[:1], 128, set()) == [128]
    assert split_prefill(prompts[:1], 128, {"a"}) == [64]


def test_many_waiting_tenants_leave_a_useful_chunk() -> None:
    waiting = {f"t{index}" for index in range(100)}
    assert split_prefill([prompt(500, "a")], 128, waiting) == [MIN_SHARE]
