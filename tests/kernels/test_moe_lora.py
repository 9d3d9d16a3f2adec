"""Experts on the CPU: equal to the mixture's definition for any mix of adapters, bits independent of the batch."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.int8 import Stack
from app.kernels.matmul.pack_weights import empty_stack, store
from app.kernels.moe_lora import reference
from app.kernels.moe_lora.cpu import ExpertRows, experts_down, experts_gate_and_up, shrink_pairs
from app.kernels.moe_lora.routing import combine, empty_pairs, gather_pairs, route, sort_pairs
from app.kernels.sgmv.adapter_copy import (
    A_SIZE,
    B_SIZE,
    COPY_TASK_WIDTH,
    D_IN,
    D_OUT,
    RANK,
    TO_A,
    TO_B,
    A,
    B,
    copy_matrices,
)
from tests.kernels.cases import normal, relative_error, spaced_logits
from tests.seeds import rng

HIDDEN, INNER, EXPERTS, CHOICES, SLOTS = 40, 24, 5, 2, 4
RANKS = (0, 1, 5, 16, 20)
Floats = NDArray[np.float32]


class Product(NamedTuple):
    """One product's weights, and its adapters as the definition and as the kernels read them. held: their memory."""

    weights: Floats
    stack: Stack
    rows: reference.ExpertRows
    kernel_rows: ExpertRows
    held: list[NDArray[np.float32]]


def _product(
    generator: np.random.Generator, team: ThreadTeam, depth: int, widths: tuple[int, ...], narrow: bool
) -> Product:
    weights = normal(generator, EXPERTS, sum(widths), depth) / np.float32(depth**0.5)
    padded = -(-widths[0] // 16) * 16
    stack = empty_stack(EXPERTS, padded * len(widths), depth, quantised=False)
    assert isinstance(stack, np.ndarray)
    stack[:] = 0
    for expert in range(EXPERTS):
        for n, part in enumerate(np.split(weights[expert], len(widths))):
            store(team, stack, expert, n * padded, part)
    ranks = generator.choice(RANKS, (SLOTS, EXPERTS, len(widths)))
    ranks[0] = 0
    total = int(ranks.sum())
    a, b = np.zeros((len(widths), total + 1, depth), np.float32), np.zeros((total + 1, sum(widths)), np.float32)
    starts, at = np.zeros((SLOTS, EXPERTS), np.int64), 0
    tables = [np.zeros(ranks.shape, np.int64) for _ in range(2)]
    held: list[NDArray[np.float32]] = []
    for slot, expert in np.ndindex(SLOTS, EXPERTS):
        starts[slot, expert] = at
        for n in range(len(widths)):
            rank = int(ranks[slot, expert, n])
            columns = slice(n * widths[0], (n + 1) * widths[0])
            rows = slice(at, at + rank)
            kind = ml_dtypes.bfloat16 if narrow else np.float32
            a[n, rows] = (normal(generator, rank, depth) / depth**0.5).astype(kind)
            b[rows, columns] = (normal(generator, rank, widths[n]) * 0.3).astype(kind)
            if rank:
                _write(team, a[n, rows], b[rows, columns], tables, (slot, expert, n), held, narrow=narrow)
        at += int(ranks[slot, expert].max())
    in_bf16 = np.full(SLOTS, narrow)
    kernel_rows = ExpertRows(*tables, ranks.astype(np.int32), in_bf16)
    return Product(weights, stack, reference.ExpertRows(a, b, widths, starts, ranks), kernel_rows, held)


def _write(
    team: ThreadTeam, a: Floats, b: Floats, tables: list[NDArray[np.int64]], place: tuple[int, int, int],
    held: list[NDArray[np.float32]], *, narrow: bool,
) -> None:  # fmt: skip
    rank, depth = a.shape
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    to_a = np.full(-(-rank // 8) * 8 * depth, np.nan, np.float32)
    to_b = np.full(rank * (-(-b.shape[1] // 16) * 16), np.nan, np.float32)
    held += [a, b, to_a, to_b]
    tasks = np.zeros((1, COPY_TASK_WIDTH), np.int64)
    tasks[0, [A, B, RANK, D_IN, D_OUT, TO_A, TO_B, A_SIZE, B_SIZE]] = [
        a.ctypes.data, b.ctypes.data, rank, depth, b.shape[1], to_a.ctypes.data, to_b.ctypes.data, 4, 4,
    ]  # fmt: skip
    team.run(copy_matrices, 2, tasks, np.array([not narrow]))
    for table, target in zip(tables, (to_a, to_b), strict=True):
        table[place] = target.ctypes.data


def _silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


class Made(NamedTuple):
    logits: Floats
    gate_up: Product
    down: Product


def _make(generator: np.random.Generator, num_tokens: int, *, narrow: bool) -> Made:
    with_team = ThreadTeam(1)
    made = Made(
        spaced_logits(generator, num_tokens, EXPERTS),
        _product(generator, with_team, HIDDEN, (INNER, INNER), narrow),
        _product(generator, with_team, INNER, (HIDDEN,), narrow),
    )
    with_team.close()
    return made


def _run(made: Made, x: Floats, slots: NDArray[np.int64], hidden: Floats, *, num_threads: int) -> Floats:
    """What the decoder does with a layer's experts; scratch is NaN at first."""
    team, num_tokens = ThreadTeam(num_threads), len(x)
    pairs, count = empty_pairs(num_tokens + 3, CHOICES, EXPERTS), num_tokens * CHOICES

    def scratch(*shape: int) -> Floats:
        return np.full(shape, np.nan, np.float32)

    inputs, gate_up, gated = scratch(count, HIDDEN), scratch(count, 64), scratch(count, INNER)
    outputs, shrunk, out = scratch(count, 48), scratch(count, 2, 24), hidden.copy()
    none = np.zeros((0, 48), np.float32)
    team.run(route, 1, made.logits[:num_tokens], True, np.float32(1.0), 1, 1, pairs)
    team.run(sort_pairs, 1, num_tokens, pairs)
    team.run(gather_pairs, 1, x, num_tokens, pairs, inputs)
    has_slots = slots if slots.any() else slots[:0]
    rows = made.gate_up.kernel_rows
    if len(has_slots):
        team.run(shrink_pairs, 1, inputs, count, pairs, slots, rows, shrunk)
    team.run(
        experts_gate_and_up, 1, inputs, count, pairs, has_slots, made.gate_up.stack, 0, none, rows, shrunk, False,
        np.float32(0.0), np.float32(1.0), gate_up,
        gated,
    )  # fmt: skip
    if len(has_slots):
        team.run(shrink_pairs, 1, gated, count, pairs, slots, made.down.kernel_rows, shrunk)
    team.run(
        experts_down,
        1,
        gated,
        count,
        pairs,
        has_slots,
        made.down.stack,
        0,
        none,
        made.down.kernel_rows,
        shrunk,
        outputs,
    )
    team.run(combine, 1, outputs, pairs, none, none[:, 0], HIDDEN, out)
    team.close()
    return out


def _expected(made: Made, x: Floats, slots: NDArray[np.int64]) -> NDArray[np.float64]:
    logits = made.logits[: len(x)].astype(np.float64)
    topk_weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = np.argsort(-topk_weights, axis=1, kind="stable")[:, :CHOICES]
    weights = np.take_along_axis(topk_weights, chosen, axis=1)
    weights /= weights.sum(axis=1, keepdims=True)
    return reference.mixture(
        x, made.gate_up.weights, made.down.weights, chosen, weights, slots, made.gate_up.rows, made.down.rows, _silu
    )


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 13, 150])
def test_equal_to_the_definition_and_to_itself_alone(num_tokens: int, narrow: bool) -> None:
    generator = rng()
    made = _make(generator, num_tokens, narrow=narrow)
    x, hidden = normal(generator, num_tokens, HIDDEN), normal(generator, num_tokens, HIDDEN)
    slots = np.sort(generator.integers(0, SLOTS, num_tokens))
    found = _run(made, x, slots, hidden, num_threads=2)
    assert relative_error(found, hidden + _expected(made, x, slots)) < 2e-6
    base = _run(made, x, slots * 0, hidden, num_threads=1)
    assert np.array_equal(found[slots == 0], base[slots == 0])
    for t in generator.permutation(num_tokens)[:8]:
        alone = Made(made.logits[t : t + 1], made.gate_up, made.down)
        row = slice(t, t + 1)
        assert np.array_equal(_run(alone, x[row], slots[row], hidden[row], num_threads=1), found[row]), t


def test_ties_are_broken_by_index_and_numbers_that_are_none_choose_the_first() -> None:
    pairs, team = empty_pairs(3, 3, EXPERTS), ThreadTeam(1)
    logits = np.array([[1, 2, 2, 1, 2], [0, 0, 0, 0, 0], [np.nan] * 5], np.float32)
    team.run(route, 1, logits, False, np.float32(1.0), 1, 1, pairs)
    assert pairs.experts.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2]]
    assert np.allclose(pairs.topk_weights[1], 0.2)
    team.run(sort_pairs, 1, 3, pairs)
    assert pairs.starts.tolist() == [0, 2, 5, 8, 8, 9]
    assert pairs.order[pairs.places].tolist() == list(range(9))
    assert pairs.busy[: pairs.num_busy[0]].tolist() == [1, 2, 0, 4], "those with most rows first"
    team.close()


def test_only_the_best_groups_are_chosen_from_and_shares_are_scaled() -> None:
    pairs, team = empty_pairs(2, 3, 6), ThreadTeam(1)
    logits = np.array([[5, 0, 4, 4, 1, 1], [1, 1, 1, 1, 1, 1]], np.float32)
    team.run(route, 1, logits, False, np.float32(2.0), 3, 2, pairs)
    topk_weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert pairs.experts.tolist() == [[0, 2, 3], [0, 1, 2]], "of equal groups the lower one"
    assert np.allclose(pairs.topk_weights, 2 * np.take_along_axis(topk_weights, pairs.experts, axis=1))
    team.run(route, 1, logits, False, np.float32(1.0), 3, 1, pairs)
    assert pairs.experts.tolist() == [[0, 1, 2], [0, 1, 2]], "those that are left out count as zero"
    assert pairs.topk_weights[:, 2].tolist() == [0, 0]
    team.close()


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_shared_expert_is_added_after_the_others(is_gated: bool) -> None:
    generator, team = rng(), ThreadTeam(1)
    pairs = empty_pairs(2, 2, EXPERTS)
    team.run(route, 1, normal(generator, 2, EXPERTS), False, np.float32(1.0), 1, 1, pairs)
    team.run(sort_pairs, 1, 2, pairs)
    outputs, shared, hidden = normal(generator, 4, 16), normal(generator, 2, 16), normal(generator, 2, 16)
    gates = normal(generator, 2) if is_gated else np.zeros(0, np.float32)
    factors = 1 / (1 + np.exp(-gates)) if is_gated else np.ones(2)
    topk_weights = pairs.topk_weights[:2, :, None]
    expected = (
        hidden + (topk_weights * outputs[pairs.places[:4]].reshape(2, 2, 16)).sum(axis=1) + factors[:, None] * shared
    )
    team.run(combine, 1, outputs.copy(), pairs, shared, gates, 12, hidden)
    assert np.allclose(hidden[:, :12], expected[:, :12], atol=1e-6)
    assert not np.allclose(hidden[:, 12:], expected[:, 12:], atol=1e-6), "columns past the width are left alone"
    team.close()
