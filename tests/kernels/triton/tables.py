"""Random rank-row tables with poison wherever a kernel has no business, as float64 NumPy and as tensors of a type."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from app.kernels.bgmv import reference
from app.kernels.lora_rows import START_MULTIPLE, RankRows
from tests.kernels.cases import normal
from tests.kernels.tensors import numpy, tensor

#: Ranks of adapters 1, 2, …: one, odd, a tile, beyond a tile, beyond the largest block of ranks.
RANKS = (1, 5, 16, 37, 70)
NUM_SLOTS = 1 + len(RANKS)
MAX_RANK = 80


class Tables(NamedTuple):
    """What the reference gets (rounded to the type, poison replaced) and what the kernel gets."""

    arrays: dict[str, NDArray[np.generic]]
    rows: RankRows

    def expected(self, x: torch.Tensor, y: torch.Tensor, slots: NDArray[np.integer]) -> NDArray[np.float64]:
        """The definition on the values that the tensors hold."""
        return reference.add_lora(numpy(x), numpy(y), widths=self.rows.widths, slots=slots, **self.arrays)


def random_tables(generator: np.random.Generator, depth: int, widths: tuple[int, ...], dtype: torch.dtype) -> Tables:
    """Adapters of `RANKS`, each leaving a slice alone now and then; what nobody owns holds NaN."""
    starts = np.cumsum([0, 3, *(rank + int(generator.integers(0, 9)) for rank in RANKS)])
    num_rows = int(starts[-1])
    row_starts = np.array([0, *starts[1:-1]], np.int32)
    ranks = np.array([[0] * len(widths), *([rank] * len(widths) for rank in RANKS)], np.int32)
    for adapter, n in itertools.product(range(1, NUM_SLOTS), range(1, len(widths))):
        ranks[adapter, n] = generator.choice([0, 1, ranks[adapter, 0], ranks[adapter, 0]])
    # Scaled so that a delta is as large as what it is added to, whatever the rank.
    a, b = np.full((len(widths), num_rows, depth), np.nan), np.full((num_rows, sum(widths)), np.nan)
    bounds = np.cumsum([0, *widths])
    for adapter in range(1, NUM_SLOTS):
        for n in range(len(widths)):
            rank = int(ranks[adapter, n])
            rows = slice(row_starts[adapter], row_starts[adapter] + rank)
            a[n, rows] = normal(generator, rank, depth) / depth**0.5
            b[rows, bounds[n] : bounds[n + 1]] = normal(generator, rank, widths[n]) / max(rank, 1) ** 0.5
    tensors = tensor(a, dtype), tensor(b, dtype)
    arrays: dict[str, NDArray[np.generic]] = {
        "a": np.nan_to_num(numpy(tensors[0])),
        "b": np.nan_to_num(numpy(tensors[1])),
        "row_starts": row_starts,
        "ranks": ranks,
    }
    return Tables(arrays, laid_out(generator, *tensors, row_starts, ranks, widths))


def laid_out(
    generator: np.random.Generator,
    a: torch.Tensor,
    b: torch.Tensor,
    row_starts: NDArray[np.int32],
    ranks: NDArray[np.int32],
    widths: tuple[int, ...],
) -> RankRows:
    """The matrices of a [N, R, depth] and b [R, W] in one piece of memory, in any order, NaN between them.

    The last of them ends where the memory does.
    """
    bounds = np.cumsum([0, *widths])
    matrices = {}
    for slot, n in zip(*np.nonzero(ranks), strict=True):
        rows = slice(row_starts[slot], row_starts[slot] + ranks[slot, n])
        matrices["a", slot, n], matrices["b", slot, n] = a[n, rows], b[rows, bounds[n] : bounds[n + 1]]
    # Where nothing is, nothing may be read: such a start lies beyond the memory.
    starts = {name: np.full(ranks.shape, 1 << 40) for name in "ab"}
    parts, size = [], 0
    for name, slot, n in generator.permutation(np.array(list(matrices), object)).tolist():
        gap = START_MULTIPLE * int(generator.integers(1, 3)) - size % START_MULTIPLE
        starts[name][slot, n] = size + gap
        parts += [torch.full((gap,), torch.nan, dtype=a.dtype, device=a.device), matrices[name, slot, n].flatten()]
        size += gap + parts[-1].numel()
    places = (tensor(starts["a"]), tensor(starts["b"]), tensor(ranks))
    return RankRows(torch.cat(parts), *places, a.shape[2], widths)
