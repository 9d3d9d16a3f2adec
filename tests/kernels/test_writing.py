"""Rank rows are where the layout says, as narrow as their values allow, and nothing beside them is touched."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.machine.team import Team
from app.kernels.sgmv.writing import PLAN_WIDTH, WritePlans, matrices, write_plan
from tests.kernels.cases import normal
from tests.seeds import rng

ROWS, LAYERS = 64, 3
#: (d_in, d_out) of modules: whole panels, parts of panels, less than one.
SHAPES = [(64, 96), (41, 33), (8, 16), (7, 5), (1, 1), (24, 130)]


def _read(memory: NDArray[np.float32], num_values: int, in_bf16: bool) -> NDArray[np.float32]:
    """The first values of contiguous memory, which is then made NaN: what is left is what nobody wrote."""
    flat = memory.reshape(-1)
    assert np.shares_memory(flat, memory)
    if in_bf16:
        values = flat.view(ml_dtypes.bfloat16)[:num_values].astype(np.float32)
        flat[: -(-num_values // 2)] = np.nan
    else:
        values = flat[:num_values].copy()
        flat[:num_values] = np.nan
    return values


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", ["wide", "narrow", "too fine", "saved narrow"])
@pytest.mark.parametrize("rank", [1, 7, 8, 9, 16, 40])
def test_every_value_has_its_place(rank: int, kind: str, num_threads: int) -> None:
    """Too fine: one value that needs more than bfloat16's bits, anywhere, takes all rows to float32.

    Saved narrow: some matrices are in bfloat16 where they come from.
    """
    generator = rng()
    a_tables = [np.full((LAYERS, ROWS // 8, d_in, 8), np.nan, np.float32) for d_in, _ in SHAPES]
    b_tables = [np.full((LAYERS, ROWS, -(-d_out // 16) * 16), np.nan, np.float32) for _, d_out in SHAPES]
    modules = []
    for layer in (0, 2):
        for n, (d_in, d_out) in enumerate(SHAPES):
            if (layer, n) != (2, 1):
                a, b = (
                    normal(generator, rank, size).astype(ml_dtypes.bfloat16).astype(np.float32)
                    for size in (d_in, d_out)
                )
                modules.append((layer, n, a, b))
    if kind == "too fine":
        matrix = modules[int(generator.integers(len(modules)))][int(generator.integers(2, 4))]
        at = int(generator.integers(matrix.shape[0])), int(generator.integers(matrix.shape[1]))
        matrix[at] = np.float32(1.00390625)  # type: ignore[index]
    saved = modules
    if kind == "saved narrow":
        dtypes = [ml_dtypes.bfloat16, ml_dtypes.bfloat16, np.float32]
        kept = iter([dtypes[i] for i in generator.integers(3, size=2 * len(modules))])
        saved = [(layer, n, a.astype(next(kept)), b.astype(next(kept))) for layer, n, a, b in modules]
    for _, _, a, b in saved:
        a.flags.writeable = b.flags.writeable = False
    row_start = 16
    team = Team(num_threads)
    too_fine = np.array([kind == "wide"])
    team.run(write_plan, 2, WritePlans(a_tables, b_tables).plan(matrices(saved), row_start), too_fine)
    team.close()
    in_bf16, padded = "narrow" in kind, -(-rank // 8) * 8
    assert too_fine[0] != in_bf16
    for layer, n, a, b in modules:
        d_in, d_out = SHAPES[n]
        rows = _read(a_tables[n][layer, row_start // 8 :], padded * d_in, in_bf16)
        found = rows.reshape(-1, d_in, 8).transpose(0, 2, 1).reshape(padded, d_in)
        np.testing.assert_array_equal(found[:rank], a)
        assert (found[rank:] == 0).all()
        num_panels = -(-d_out // 16)
        found = _read(b_tables[n][layer, row_start:], num_panels * rank * 16, in_bf16).reshape(num_panels, rank, 16)
        found = found.transpose(1, 0, 2).reshape(rank, -1)
        np.testing.assert_array_equal(found[:, :d_out], b)
        assert (found[:, d_out:] == 0).all()
    assert all(np.isnan(table).all() for table in (*a_tables, *b_tables))


def test_an_empty_plan_writes_nothing() -> None:
    table, b_table = np.zeros((1, 1, 8, 8), np.float32), np.zeros((1, 8, 16), np.float32)
    plan = WritePlans([table], [b_table]).plan(matrices([]), 0)
    assert plan.shape == (0, PLAN_WIDTH)
    Team(1).run(write_plan, 2, plan, np.zeros(1, np.bool_))
