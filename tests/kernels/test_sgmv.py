"""LoRA deltas: equal to the per-row loop for any mix of ranks; base rows untouched, bits independent of company."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.machine.team import Team
from app.kernels.sgmv import cpu, reference
from app.kernels.sgmv.writing import WritePlans, matrices, write_plan
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.seeds import rng

DEPTH, WIDTH, ROWS = 72, 48, 256
Floats = NDArray[np.float32]
#: Adapter slot -> (row start, rank): the base, small, odd, a whole panel, large.
PLACES = [(0, 0), (8, 1), (16, 5), (24, 8), (32, 16), (64, 37), (128, 128)]
#: Adapter slots whose values are bfloat16's.
NARROW = (2, 4, 6)
CASES = {
    "no tokens": [],
    "one token": [(1, 3)],
    "only the base": [(9, 0)],
    "one adapter for all": [(33, 5)],
    "a different adapter each": [(1, s) for s in range(7)],
    "rank 1 beside the largest": [(3, 1), (5, 6), (1, 0), (2, 1)],
    "sizes that divide nothing": [(13, 2), (7, 4), (1, 6), (29, 5), (3, 0)],
    "a long run": [(101, 4), (1, 6)],
}


class Tables(NamedTuple):
    """Rows and panels of a and b; rows no adapter owns are NaN, tails of an adapter's last panel zero."""

    a: Floats
    a_panels: Floats
    b: Floats
    b_rows: Floats
    places: cpu.RowPlaces


def _tables(generator: np.random.Generator, *, wide: bool = False) -> Tables:
    """`wide`: all in float32; else adapters of `NARROW` in two bytes per value."""
    a, b = np.full((ROWS, DEPTH), np.nan, np.float32), np.full((ROWS, WIDTH), np.nan, np.float32)
    b_rows = np.full((ROWS, WIDTH), np.nan, np.float32)
    panels = np.full((ROWS // 8, DEPTH, 8), np.nan, np.float32)
    places = cpu.RowPlaces(np.array([start for start, _ in PLACES]), np.zeros(len(PLACES), np.bool_))
    for adapter_slot, (start, rank) in enumerate(PLACES[1:], 1):
        dtype = ml_dtypes.bfloat16 if adapter_slot in NARROW else np.float32
        for rows, size in ((a, DEPTH), (b, WIDTH)):
            rows[start : start + rank] = normal(generator, rank, size).astype(dtype)
        module = (0, 0, a[start : start + rank], b[start : start + rank])
        too_fine = np.array([wide])
        Team(2).run(write_plan, 2, WritePlans([panels[None]], [b_rows[None]]).plan(matrices([module]), start), too_fine)
        places.in_bf16[adapter_slot] = not too_fine[0]
    return Tables(a, panels, b, b_rows, places)


def _run(
    x: NDArray[np.float32], tables: Tables, case: list[tuple[int, int]], out: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    run_starts = np.cumsum([0, *(n for n, _ in case)]).astype(np.int32)
    adapter_slots = np.array([s for _, s in case], np.int32)
    ranks = np.array([p[1] for p in PLACES], np.int32)
    runs = cpu.adapter_runs(run_starts, adapter_slots)
    shrunk = np.full((len(x), 2, 128), np.nan, np.float32)
    both = np.stack([np.zeros_like(ranks), ranks], axis=1)
    team = Team(3)
    panels, tasks = (tables.a_panels, tables.a_panels), cpu.shrink_tasks(runs)
    team.run(cpu.shrink, 1, x, panels, both, tasks, 128, tables.places, shrunk)
    wide = np.concatenate([np.zeros_like(out), out], axis=1)  # both modules side by side; the first is left alone
    team.run(cpu.expand, 1, shrunk, (tables.b_rows, tables.b_rows), both, runs, tables.places, wide)
    assert not wide[:, : out.shape[1]].any()
    out[:] = wide[:, out.shape[1] :]
    return run_starts, adapter_slots


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop_over_rows(name: str) -> None:
    generator, case = rng(), CASES[name]
    tables = _tables(generator)
    assert tuple(np.flatnonzero(tables.places.in_bf16)) == NARROW
    x = normal(generator, sum(n for n, _ in case), DEPTH)
    base = normal(generator, len(x), WIDTH)
    out = base.copy()
    run_starts, adapter_slots = _run(x, tables, case, out)
    row_starts, ranks = np.array([p[0] for p in PLACES]), np.array([p[1] for p in PLACES], np.int32)
    a, b = np.nan_to_num(tables.a), np.nan_to_num(tables.b)
    delta = reference.lora_delta(x, a, b, run_starts, adapter_slots, row_starts, ranks)
    assert relative_error(out, base + delta) < TOLERANCE["float32"]
    of_base = np.repeat(adapter_slots, np.diff(run_starts)) == 0
    assert np.array_equal(out[of_base], base[of_base])


def test_a_token_has_the_same_bits_alone_and_in_any_batch() -> None:
    generator = rng()
    tables = _tables(generator)
    for adapter_slot in range(1, len(PLACES)):
        row, base = normal(generator, DEPTH), normal(generator, WIDTH)
        alone = base[None].copy()
        _run(row[None], tables, [(1, adapter_slot)], alone)
        for _ in range(20):
            case = [(int(generator.integers(1, 30)), int(generator.integers(0, 7))) for _ in range(5)]
            case.insert(int(generator.integers(6)), (int(generator.integers(1, 20)), adapter_slot))
            x = normal(generator, sum(n for n, _ in case), DEPTH)
            tokens = np.flatnonzero(np.repeat([s for _, s in case], [n for n, _ in case]) == adapter_slot)
            at = int(generator.choice(tokens))
            x[at] = row
            out = normal(generator, len(x), WIDTH)
            out[at] = base
            _run(x, tables, case, out)
            assert np.array_equal(out[at], alone[0])


def test_rows_in_two_bytes_give_the_bits_of_rows_in_four() -> None:
    seed = int(rng().integers(2**31))
    narrow, wide = (_tables(np.random.default_rng(seed), wide=wide) for wide in (False, True))
    generator = np.random.default_rng(seed)
    for case in (*CASES.values(), [(n, s) for s in NARROW for n in (1, 2, 3, 4, 7)]):
        x = normal(generator, sum(n for n, _ in case), DEPTH)
        base = normal(generator, len(x), WIDTH)
        results = [base.copy(), base.copy()]
        for tables, out in zip((narrow, wide), results, strict=True):
            _run(x, tables, case, out)
        assert np.array_equal(*results), (seed, case)
