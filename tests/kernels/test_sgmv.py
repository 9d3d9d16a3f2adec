"""LoRA deltas: equal to the per-row loop for any mix of ranks; base rows untouched, bits independent of the batch."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.sgmv import cpu, reference
from app.kernels.sgmv.adapter_copy import TO_A, TO_B, copy_matrices, matrices, packing
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
    """Rows of a and b as the definition reads them, NaN where no adapter has any, and as the kernels do.

    The kernels' are of two modules, the first of which every adapter leaves alone. held: their memory.
    """

    a: Floats
    b: Floats
    rows: cpu.ModuleRows
    held: list[NDArray[np.uint8]]


def _tables(generator: np.random.Generator, *, wide: bool = False) -> Tables:
    """`wide`: all in float32; else adapters of `NARROW` in two bytes per value."""
    a, b = np.full((ROWS, DEPTH), np.nan, np.float32), np.full((ROWS, WIDTH), np.nan, np.float32)
    rows, held = no_rows((WIDTH, WIDTH)), []
    for adapter_slot, (start, rank) in enumerate(PLACES[1:], 1):
        dtype = ml_dtypes.bfloat16 if adapter_slot in NARROW else np.float32
        for table, size in ((a, DEPTH), (b, WIDTH)):
            table[start : start + rank] = normal(generator, rank, size).astype(dtype)
        held.append(write(rows, adapter_slot, {1: (a[start : start + rank], b[start : start + rank])}, wide=wide))
    return Tables(a, b, rows, held)


def no_rows(widths: tuple[int, ...]) -> cpu.ModuleRows:
    """For as many adapter slots as `PLACES` has; addresses that nobody may read."""
    shape = len(PLACES), len(widths)
    nowhere = np.full(shape, -1)
    num_panels = np.array([-(-width // 16) for width in widths])
    return cpu.ModuleRows(
        nowhere, nowhere.copy(), np.zeros(shape, np.int32), num_panels, np.zeros(len(PLACES), np.bool_)
    )


def write(
    rows: cpu.ModuleRows, adapter_slot: int, pairs: dict[int, tuple[Floats, Floats]], *, wide: bool = False
) -> NDArray[np.uint8]:
    """An adapter's matrices by module, and where they are from now on; memory beside them would be NaN."""
    source = matrices((0, n, *pair) for n, pair in pairs.items())
    packed, too_fine = packing(source), np.array([wide])
    memory = np.full(packed.num_bytes, 0xFF, np.uint8)
    tasks = packed.at(memory.ctypes.data)
    ThreadTeam(2).run(copy_matrices, 2, tasks, too_fine)
    for line, (n, (a, _)) in zip(tasks, pairs.items(), strict=True):
        rows.a[adapter_slot, n], rows.b[adapter_slot, n], rows.ranks[adapter_slot, n] = line[TO_A], line[TO_B], len(a)
    rows.in_bf16[adapter_slot] = not too_fine[0]
    return memory


def _run(
    x: NDArray[np.float32], tables: Tables, case: list[tuple[int, int]], out: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    run_starts = np.cumsum([0, *(n for n, _ in case)]).astype(np.int32)
    adapter_slots = np.array([s for _, s in case], np.int32)
    runs = cpu.adapter_runs(run_starts, adapter_slots)
    shrunk = np.full((len(x), 2, 128), np.nan, np.float32)
    team = ThreadTeam(3)
    team.run(cpu.shrink, 1, x, tables.rows, cpu.shrink_tasks(runs), 128, shrunk)
    wide = np.concatenate([np.zeros_like(out), out], axis=1)  # both modules side by side; the first is left alone
    team.run(cpu.expand, 1, shrunk, tables.rows, runs, wide)
    assert not wide[:, : out.shape[1]].any()
    out[:] = wide[:, out.shape[1] :]
    return run_starts, adapter_slots


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop_over_rows(name: str) -> None:
    generator, case = rng(), CASES[name]
    tables = _tables(generator)
    assert tuple(np.flatnonzero(tables.rows.in_bf16)) == NARROW
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
