"""Rank rows are where the layout says, as narrow as their values allow, and nothing beside them is touched."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.sgmv.adapter_copy import COPY_TASK_WIDTH, TO_A, TO_B, copy_matrices, matrices, packing
from tests.kernels.cases import normal
from tests.pairwise import pairwise
from tests.seeds import rng

#: (d_in, d_out) of modules: whole panels, parts of panels, less than one.
SHAPES = [(64, 96), (41, 33), (8, 16), (7, 5), (1, 1), (24, 130)]


def _taken(memory: NDArray[np.uint8], first: int, shape: tuple[int, ...], in_bf16: bool) -> NDArray[np.float32]:
    """A matrix from where it begins, whose bytes are then made 0xFF: what is left is what nobody wrote."""
    dtype = np.dtype(ml_dtypes.bfloat16 if in_bf16 else np.float32)
    own = memory[first : first + int(np.prod(shape)) * dtype.itemsize]
    values = own.view(dtype).astype(np.float32).reshape(shape)
    own[:] = 0xFF
    return values


@pairwise({"num_threads": [1, 3], "kind": ["wide", "narrow", "too fine", "saved narrow"], "rank": [1, 7, 8, 9, 16, 40]})
def test_every_value_has_its_place(rank: int, kind: str, num_threads: int) -> None:
    """Too fine: one value that needs more than bfloat16's bits, anywhere, takes all rows to float32.

    Saved narrow: some matrices are in bfloat16 where they come from.
    """
    generator = rng()
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
    team, too_fine = ThreadTeam(num_threads), np.array([kind == "wide"])
    packed = packing(matrices(saved))
    memory = np.full(packed.num_bytes + 64, 0xFF, np.uint8)
    team.run(copy_matrices, 2, packed.at(memory.ctypes.data + 32), too_fine)
    team.close()
    in_bf16, padded = "narrow" in kind, -(-rank // 8) * 8
    assert too_fine[0] != in_bf16
    for line, (_, n, a, b) in zip(packed.at(32), modules, strict=True):
        (d_in, d_out), num_panels = SHAPES[n], -(-SHAPES[n][1] // 16)
        found = _taken(memory, line[TO_A], (padded // 8, d_in, 8), in_bf16).transpose(0, 2, 1).reshape(padded, d_in)
        np.testing.assert_array_equal(found[:rank], a)
        assert (found[rank:] == 0).all()
        found = _taken(memory, line[TO_B], (num_panels, rank, 16), in_bf16).transpose(1, 0, 2).reshape(rank, -1)
        np.testing.assert_array_equal(found[:, :d_out], b)
        assert (found[:, d_out:] == 0).all()
    assert (memory == 0xFF).all()


def test_what_was_saved_in_bfloat16_takes_half_and_what_modules_share_is_held_once() -> None:
    generator = rng()
    a, b, c = (normal(generator, 9, size) for size in (40, 17, 32))
    size_a, size_b, size_c = 16 * 40, 9 * 32, 9 * 32
    assert packing(matrices([(0, 0, a, b), (0, 1, a, c)])).num_bytes == 4 * (size_a + size_b + size_c)
    narrow_a, narrow_b = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
    narrow = packing(matrices([(0, 0, narrow_a, narrow_b)]))
    assert (narrow.in_bf16, narrow.num_bytes) == (True, 2 * (size_a + size_b))
    mixed = packing(matrices([(0, 0, narrow_a, narrow_b), (1, 0, a, narrow_b)]))
    assert (mixed.in_bf16, mixed.num_bytes) == (False, 4 * (2 * size_a + size_b))


def test_no_tasks_write_nothing() -> None:
    packed = packing(matrices([]))
    assert (packed.tasks.shape, packed.num_bytes) == ((0, COPY_TASK_WIDTH), 0)
    ThreadTeam(1).run(copy_matrices, 2, packed.at(0), np.zeros(1, np.bool_))
