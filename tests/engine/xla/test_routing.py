"""The way of tokens to their experts and back: every pair once, sorted, and ties are broken by index."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from app.engine.models.spec import RouterSpec
from app.engine.xla.routing import combine, page_runs, route, sort_pairs
from app.kernels.sgmv.xla import SEGMENT_TOKENS
from tests.seeds import rng


def test_of_equal_shares_the_lower_expert_comes_first() -> None:
    logits = jnp.array([[0.0, 1.0, 1.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0]], jnp.float32)
    experts, topk_weights = route(logits, RouterSpec(5, 2, normalised=True))
    assert experts.tolist() == [[1, 2], [0, 1]]
    np.testing.assert_allclose(topk_weights, 0.5)


def test_only_the_best_groups_are_chosen_from() -> None:
    logits = jnp.array([[5.0, 0.0, 4.0, 3.0, 0.0, 4.5]], jnp.float32)
    experts, topk_weights = route(logits, RouterSpec(6, 3, normalised=False, scale=2.0, num_groups=3, top_groups=2))
    assert experts.tolist() == [[0, 5, 1]]
    whole = np.exp(logits[0]) / np.exp(logits[0]).sum()
    np.testing.assert_allclose(topk_weights[0], 2 * whole[np.array([0, 5, 1])], rtol=1e-6)


@pytest.mark.parametrize(("first", "count"), [(0, 7), (0, 3), (3, 4)])
def test_every_pair_of_ones_own_experts_is_there_once_in_order(first: int, count: int) -> None:
    generator, num_slots, num_tokens = rng(), 4, 11
    experts = np.stack([generator.permutation(7)[:3] for _ in range(13)]).astype(np.int32)
    slots = generator.integers(0, num_slots, 13).astype(np.int32)
    topk_weights = generator.random((13, 3)).astype(np.float32)
    pairs = sort_pairs(
        jnp.array(experts),
        jnp.array(topk_weights),
        jnp.int32(first),
        count,
        jnp.array(slots),
        num_slots,
        jnp.int32(num_tokens),
    )
    expected = sorted(
        (experts[t, k] - first, slots[t], t, k)
        for t, k in np.ndindex(num_tokens, 3)
        if first <= experts[t, k] < first + count
    )
    starts = np.asarray(pairs.starts)
    assert starts[0] == 0
    assert starts[-1] == len(expected)
    for i, (expert, slot, t, k) in enumerate(expected):
        assert starts[expert] <= i < starts[expert + 1]
        assert int(pairs.tokens[i]) == t
        assert int(pairs.places[t, k]) == i
        assert int(pairs.keys[i]) == expert * num_slots + slot
    assert (np.asarray(pairs.keys[len(expected) :]) >= count * num_slots).all()

    outputs = generator.standard_normal((39, 5)).astype(np.float32)
    outputs[len(expected) :] = np.nan
    summed = np.zeros((13, 5))
    for i, (_, _, t, k) in enumerate(expected):
        summed[t] += topk_weights[t, k] * outputs[i]
    np.testing.assert_allclose(combine(jnp.array(outputs), pairs), summed, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("longest", [1, SEGMENT_TOKENS, 3 * SEGMENT_TOKENS + 1])
def test_every_pair_of_an_adapter_that_changes_its_expert_is_in_one_run(longest: int) -> None:
    """Runs are no longer than a segment, and never of two experts or two adapters, even where their pages follow."""
    generator, no_page = rng(), 99
    first_pages = np.where(generator.random(12) < 0.5, no_page, np.arange(12)).astype(np.int32)
    first_pages[[3, 4]] = 3, 4
    counts = generator.integers(0, longest + 1, 12)
    counts[[3, 4]] = longest
    keys = np.concatenate([np.repeat(np.arange(12), counts), [12, 13, 40]]).astype(np.int32)  # at the end: not mine
    runs = page_runs(jnp.array(keys), jnp.array(first_pages), no_page)
    seen: list[int] = []
    for (first, end), page in zip(
        np.asarray(runs.bounds)[: int(runs.num_runs)].tolist(), np.asarray(runs.pages).tolist(), strict=False
    ):
        assert 0 < end - first <= SEGMENT_TOKENS
        assert set(keys[first:end].tolist()) == {keys[first]}
        assert page == first_pages[keys[first]] != no_page
        seen += range(first, end)
    assert seen == [row for row, key in enumerate(keys.tolist()) if key < 12 and first_pages[key] != no_page]
