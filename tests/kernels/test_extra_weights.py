"""Adapters' own weights, scales, shifts, norms, rows and heads, on the rows of their runs and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.extra_weights import cpu, reference
from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.cpu import PANEL, pack
from app.kernels.norms.cpu import rms_norm
from app.kernels.rotary.cpu import rotate_and_store
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.pairwise import pairwise
from tests.seeds import rng


@jit
def _module(x, tables, runs, first, end, out, out_panel, saved, residual):  # type: ignore[no-untyped-def]
    if residual:
        cpu.save_rows(tables, 0, 0, runs, out_panel + first, out_panel + end, out, saved)
    cpu.change_columns(x, tables, 0, 0, runs, first, end, out, out_panel)
    if residual:
        cpu.restore_rows(tables, 0, 0, runs, out_panel + first, out_panel + end, saved, out)


def _padded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([values, np.zeros(-len(values) % PANEL, np.float32)])


@pytest.mark.parametrize("parts", ["scale", "shift", "scale shift", "weight", "weight shift", "weight scale shift"])
@pytest.mark.parametrize("residual", [False, True])
def test_a_module_is_the_definitions_in_its_runs_only(parts: str, residual: bool) -> None:
    generator = rng()
    d_in, d_out, num_rows, out_panel = 24, 37, 9, 2
    x = normal(generator, num_rows, d_in)
    weight, scale, shift = normal(generator, d_out, d_in), normal(generator, d_out), normal(generator, d_out)
    arrays = {"weights": pack(weight), "scales": _padded(scale), "shifts": _padded(shift)}
    tables = cpu.empty_tables(1, 3, 1)
    for name, array in arrays.items():
        if name[:-1] in parts:
            getattr(tables, name)[0, 2, 0] = array.ctypes.data
    width = len(arrays["scales"])
    out = normal(generator, num_rows, out_panel * PANEL + width + PANEL)
    before, saved = out.copy(), np.full_like(out, np.nan)
    runs = np.array([[1, 2, 2], [4, 8, 2], [8, 9, 1]], np.int64)  # slot 1 has nothing
    for panel in range(width // PANEL):
        _module(x, tables, runs, panel, panel + 1, out, out_panel, saved, residual)
    mine = [1, 4, 5, 6, 7]
    column = out_panel * PANEL
    expected = before.astype(np.float64)
    for t in mine:
        y = before[t, column : column + d_out]
        # The product that was to be scaled is not here: what was set aside comes back unchanged.
        start = np.zeros_like(y) if residual and parts != "shift" else y
        own = reference.module(
            start,
            x[t],
            weight if "weight" in parts else None,
            scale if "scale" in parts else None,
            shift if "shift" in parts else None,
        )
        expected[t, column : column + d_out] = own + (y - start)
    assert relative_error(out[:, column : column + d_out], expected[:, column : column + d_out]) < TOLERANCE["float32"]
    others = [t for t in range(num_rows) if t not in mine]
    np.testing.assert_array_equal(out[others], before[others])
    np.testing.assert_array_equal(out[:, :column], before[:, :column])
    np.testing.assert_array_equal(out[:, column + width :], before[:, column + width :])


@pairwise(
    {"num_threads": [1, 2], "with_weight": [False, True], "num_ids, rank": [(0, 0), (1, 0), (0, 1), (17, 5), (40, 33)]}
)
def test_a_head_is_the_definitions_in_its_runs_only(
    num_threads: int, with_weight: bool, num_ids: int, rank: int
) -> None:
    generator = rng()
    hidden, vocab, num_rows = 24, 77, 7
    x, head = normal(generator, num_rows, hidden), normal(generator, vocab, hidden)
    weight, rows = normal(generator, vocab, hidden), normal(generator, num_ids, hidden)
    a, b = normal(generator, rank, hidden), normal(generator, rank, vocab)
    ids = np.sort(generator.permutation(vocab)[:num_ids]).astype(np.int64)
    held: dict[str, Any] = {"head_weight": pack(weight)} if with_weight else {}
    held |= {"head_ids": ids, "head_rows": pack(rows)} if num_ids else {}
    held |= {"head_a": pack(a), "head_b": pack(b.T)} if rank else {}
    tables = cpu.empty_tables(1, 2, 1)
    for name, array in held.items():
        getattr(tables, name)[1] = array.ctypes.data
    tables.num_head_ids[1], tables.head_ranks[1] = num_ids, rank
    runs = np.array([[2, 3, 1], [4, 7, 1]], np.int64)
    packed = pack(head)
    inputs = np.full((num_rows, (-(-num_ids // PANEL) - (-rank // PANEL)) * PANEL), np.nan, np.float32)
    plain, logits = (np.full((num_rows, len(packed) * PANEL), np.nan, np.float32) for _ in range(2))
    team = ThreadTeam(num_threads)
    team.run(cpu.head_with_extras, 1, x, packed, tables, runs[:0], inputs, plain)
    team.run(cpu.extra_head_inputs, 1, x, tables, runs, inputs)
    team.run(cpu.head_with_extras, 1, x, packed, tables, runs, inputs, logits)
    team.close()
    mine = [2, 4, 5, 6]
    for p in mine:
        expected = reference.logits(plain[p, :vocab], x[p], weight if with_weight else None, ids.tolist(), rows, a, b)
        assert relative_error(logits[p, :vocab], expected) < TOLERANCE["float32"]
    others = [p for p in range(num_rows) if p not in mine]
    np.testing.assert_array_equal(logits[others], plain[others])


def _address(table: NDArray[np.int64], place: Any, values: NDArray[Any]) -> None:
    table[place] = values.ctypes.data


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("has_slots", [True, False])
def test_rows_are_normalised_with_their_adapters_weight(num_threads: int, has_slots: bool) -> None:
    """To the bit: which weight is read is all that changes."""
    generator, team = rng(), ThreadTeam(num_threads)
    x, weights = normal(generator, 11, 37), normal(generator, 2, 37)
    slots = np.array([0, 1, 2] * 3 + [0, 2], np.int64)[: 11 if has_slots else 0]  # slot 1 has no norm
    addresses = np.zeros(3, np.int64)
    _address(addresses, 2, weights[1])
    rows = np.array([1, 2, 2, 5, 10], np.int32)
    own = np.array([slots[t] == 2 if has_slots else False for t in range(len(x))])
    out, sampled = np.full_like(x, np.nan), np.full((5, 37), np.nan, np.float32)
    team.run(cpu.rms_norm_with_extras, 1, x, weights[0], np.float32(1e-5), addresses, slots, out)
    team.run(cpu.gather_normed_with_extras, 1, x, rows, weights[0], np.float32(1e-5), addresses, slots, sampled)
    plain = [np.empty_like(x) for _ in weights]
    for weight, normed in zip(weights, plain, strict=True):
        team.run(rms_norm, 1, x, weight, np.float32(1e-5), normed)
    team.close()
    expected = np.where(own[:, None], plain[1], plain[0])
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(sampled, expected[rows])


@pytest.mark.parametrize("has_slots", [True, False])
def test_heads_are_normalised_with_their_adapters_weights_before_they_are_rotated(has_slots: bool) -> None:
    generator, team = rng(), ThreadTeam(2)
    heads, kv_heads, dim, num_tokens = 3, 2, 6, 5
    q_size, kv_size = 32, 16
    qkv = normal(generator, num_tokens, q_size + 2 * kv_size)
    positions, kv_slots = np.arange(num_tokens, dtype=np.int32), np.arange(num_tokens, dtype=np.int64)
    cos, sin = normal(generator, num_tokens, dim // 2), normal(generator, num_tokens, dim // 2)
    base, own = normal(generator, 2, dim), normal(generator, 2, dim)
    slots = np.array([0, 1, 2, 3, 0], np.int64)[: num_tokens if has_slots else 0]
    norms = np.zeros((4, 4), np.int64)
    _address(norms, (1, cpu.Q_NORM), own[0])
    _address(norms, (2, cpu.K_NORM), own[1])
    of_token = [(base[0], base[1])] * num_tokens
    if has_slots:
        of_token[1], of_token[2] = (own[0], base[1]), (base[0], own[1])

    def run(kernel: Any, *leading: Any, q_norm: Any, k_norm: Any) -> tuple[NDArray[np.float32], ...]:
        rotated = qkv.copy()
        k_memory, v_memory = np.zeros((1, kv_heads, 16, 8), np.float32), np.zeros((1, kv_heads, 8, 16), np.float32)
        team.run(
            kernel, 1, *leading, rotated, positions, kv_slots, cos, sin, q_norm, k_norm, np.float32(1e-5), k_memory,
            v_memory, heads, kv_heads, dim, q_size, kv_size,
        )  # fmt: skip
        return rotated, k_memory[0].transpose(2, 0, 1), v_memory[0].swapaxes(0, 1)  # each by token

    found = run(cpu.rotate_and_store_with_extras, norms, slots, q_norm=base[0], k_norm=base[1])
    for t, (q_norm, k_norm) in enumerate(of_token):
        expected = run(rotate_and_store, q_norm=q_norm, k_norm=k_norm)
        for ours, alone in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours[t], alone[t])
    team.close()


@pytest.mark.parametrize("rows", ["none", "some", "all"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_token_is_looked_up_in_its_adapters_rows(rows: str, rank: int) -> None:
    generator, team = rng(), ThreadTeam(2)
    vocab, hidden = 19, 21
    ids = {"none": [], "some": [2, 5, 18], "all": list(range(vocab))}[rows]
    own_rows, own_ids = normal(generator, len(ids), hidden), np.array(ids, np.int64)
    a, b = normal(generator, vocab, rank), normal(generator, rank, hidden)
    tables = cpu.empty_tables(1, 3, 1)
    if ids:
        _address(tables.embed_rows, 2, own_rows)
    if rows == "some":
        _address(tables.embed_ids, 2, own_ids)
        tables.num_embed_ids[2] = len(ids)
    if rank:
        _address(tables.embed_a, 2, a)
        _address(tables.embed_b, 2, b)
        tables.embed_ranks[2] = rank
    token_ids = np.array([2, 3, 5, 18, 2, 0], np.int32)
    slots = np.array([2, 2, 2, 2, 0, 1], np.int64)
    before = normal(generator, len(token_ids), hidden)
    out = before.copy()
    team.run(cpu.change_embeddings, 1, token_ids, tables, slots, out)
    team.close()
    for t, token_id in enumerate(token_ids[:4].tolist()):
        expected = reference.embedding(before[t], token_id, None if rows == "all" else ids, own_rows, a, b)
        assert relative_error(out[t], expected) < TOLERANCE["float32"]
    np.testing.assert_array_equal(out[4:], before[4:])
