"""Own weights, scales, shifts and heads are the definition's, on the rows of their runs and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.extras import cpu, reference
from app.kernels.machine.compiled import compiled
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL, pack
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.seeds import rng


@compiled
def _module(x, tables, runs, first, end, out, out_panel, kept, residual):  # type: ignore[no-untyped-def]
    if residual:
        cpu.set_aside(tables, 0, 0, runs, out_panel + first, out_panel + end, out, kept)
    cpu.own_columns(x, tables, 0, 0, runs, first, end, out, out_panel)
    if residual:
        cpu.put_back(tables, 0, 0, runs, out_panel + first, out_panel + end, kept, out)


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
    before, kept = out.copy(), np.full_like(out, np.nan)
    runs = np.array([[1, 2, 2], [4, 8, 2], [8, 9, 1]], np.int64)  # slot 1 has nothing
    for panel in range(width // PANEL):
        _module(x, tables, runs, panel, panel + 1, out, out_panel, kept, residual)
    mine = [1, 4, 5, 6, 7]
    column = out_panel * PANEL
    expected = before.astype(np.float64)
    for t in mine:
        y = before[t, column : column + d_out]
        # The product that was to be scaled is not here: what was set aside comes back unchanged.
        start = np.zeros_like(y) if residual and parts != "shift" else y
        own = reference.own_module(
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


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize(("num_ids", "rank"), [(0, 0), (1, 0), (0, 1), (17, 5), (40, 33)])
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
    team = Team(num_threads)
    team.run(cpu.own_head, 1, x, packed, tables, runs[:0], inputs, plain)
    team.run(cpu.own_head_inputs, 1, x, tables, runs, inputs)
    team.run(cpu.own_head, 1, x, packed, tables, runs, inputs, logits)
    team.close()
    mine = [2, 4, 5, 6]
    for p in mine:
        expected = reference.own_logits(
            plain[p, :vocab], x[p], weight if with_weight else None, ids.tolist(), rows, a, b
        )
        assert relative_error(logits[p, :vocab], expected) < TOLERANCE["float32"]
    others = [p for p in range(num_rows) if p not in mine]
    np.testing.assert_array_equal(logits[others], plain[others])
