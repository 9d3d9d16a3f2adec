"""Rank rows are where the layout says, and nothing beside them is touched."""

from __future__ import annotations

import numpy as np
import pytest

from app.kernels.sgmv._writing import WritePlans, write_plan
from app.kernels.team import Team
from tests.kernels.cases import normal

ROWS, LAYERS = 64, 3
#: (d_in, d_out) of modules: whole panels, parts of panels, less than one.
SHAPES = [(64, 96), (41, 33), (8, 16), (7, 5), (1, 1), (24, 130)]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("rank", [1, 7, 8, 9, 16, 40])
def test_every_value_has_its_place(rank: int, num_threads: int) -> None:
    generator = np.random.default_rng()
    a_tables = [np.full((LAYERS, ROWS // 8, d_in, 8), np.nan, np.float32) for d_in, _ in SHAPES]
    b_tables = [np.full((LAYERS, -(-d_out // 16), ROWS, 16), np.nan, np.float32) for _, d_out in SHAPES]
    modules = []
    for layer in (0, 2):
        for n, (d_in, d_out) in enumerate(SHAPES):
            if (layer, n) != (2, 1):
                a, b = normal(generator, rank, d_in), normal(generator, rank, d_out)
                a.flags.writeable = b.flags.writeable = False
                modules.append((layer, n, a, b))
    row_start = 16
    team = Team(num_threads)
    team.run(write_plan, 1, WritePlans(a_tables, b_tables).plan(modules, row_start))
    team.close()
    for layer, n, a, b in modules:
        d_in, d_out = SHAPES[n]
        padded = -(-rank // 8) * 8
        found = a_tables[n][layer].transpose(0, 2, 1).reshape(ROWS, d_in)  # [R, d_in]
        np.testing.assert_array_equal(found[row_start : row_start + rank], a)
        assert (found[row_start + rank : row_start + padded] == 0).all()
        found = b_tables[n][layer].transpose(1, 0, 2).reshape(ROWS, -1)  # [R, d_out and a rest]
        np.testing.assert_array_equal(found[row_start : row_start + rank, :d_out], b)
        found[row_start : row_start + rank, :d_out] = np.nan
        assert np.isnan(found).all()
        b_tables[n][layer] = np.nan
        a_tables[n][layer, row_start // 8 : (row_start + padded) // 8] = np.nan
    assert all(np.isnan(table).all() for table in (*a_tables, *b_tables))


def test_an_empty_plan_writes_nothing() -> None:
    table, b_table = np.zeros((1, 1, 8, 8), np.float32), np.zeros((1, 1, 8, 16), np.float32)
    plan = WritePlans([table], [b_table]).plan([], 0)
    assert plan.shape == (0, 8)
    Team(1).run(write_plan, 1, plan)
