"""Adapters' matrices on their way into the CPU's rank rows.

In: matrices in float32 or bfloat16, and where their rows begin. Out: the rows, in two bytes per value if that holds all
of them. The kernel reads float32 (`app.kernels.sgmv._writing`), so what is in bfloat16 is widened for it, a piece that
stays in a core's cache at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.lora import BFLOAT16, Matrix, widened
from app.kernels.sgmv._writing import WritePlans, write_plan
from app.kernels.team import Team

#: A piece: 4 MiB once it is widened.
_PIECE_VALUES = 1 << 20

#: Layer, module, a [r, d_in], b [r, d_out].
Module = tuple[int, int, Matrix, Matrix]


class RowWriter:
    """Writes adapters into one set of tables. One thread calls it."""

    def __init__(self, team: Team, plans: WritePlans) -> None:
        self._team = team
        self._plans = plans
        self._wide: NDArray[np.uint32] = np.empty(0, np.uint32)

    def write(self, modules: Sequence[Module], row_start: int) -> bool:
        """Whether the rows are in bfloat16: all modules' or none."""
        if all(a.dtype == b.dtype == BFLOAT16 for _, _, a, b in modules):
            for piece in _pieces(modules):
                assert self._run(self._widened(piece), row_start), "bfloat16 values are bfloat16's"
            return True
        return self._run(
            [
                (layer, n, np.ascontiguousarray(widened(a)), np.ascontiguousarray(widened(b)))
                for layer, n, a, b in modules
            ],
            row_start,
        )

    def _run(self, modules: Sequence[Module], row_start: int) -> bool:
        too_fine = np.zeros(1, np.bool_)
        self._team.run(write_plan, 2, self._plans.plan(modules, row_start), too_fine)
        return not too_fine[0]

    def _widened(self, modules: Sequence[Module]) -> list[Module]:
        """The same in float32, in memory that the next call uses again."""
        matrices = [matrix for _, _, a, b in modules for matrix in (a, b)]
        ends = list(accumulate((matrix.size for matrix in matrices), initial=0))
        if ends[-1] > len(self._wide):
            self._wide = np.empty(max(ends[-1], _PIECE_VALUES), np.uint32)
        wide = self._wide[: ends[-1]]
        np.concatenate([matrix.reshape(-1).view(np.uint16) for matrix in matrices], out=wide)
        wide <<= np.uint32(16)
        floats = wide.view(np.float32)
        found = [
            floats[first:end].reshape(matrix.shape)
            for matrix, (first, end) in zip(matrices, pairwise(ends), strict=True)
        ]
        return [(layer, n, found[2 * i], found[2 * i + 1]) for i, (layer, n, _, _) in enumerate(modules)]


def _pieces(modules: Sequence[Module]) -> Iterator[list[Module]]:
    """Runs of modules that fit into a piece; one that is larger is a run of its own."""
    piece: list[Module] = []
    num_values = 0
    for module in modules:
        size = module[2].size + module[3].size
        if piece and num_values + size > _PIECE_VALUES:
            yield piece
            piece, num_values = [], 0
        piece.append(module)
        num_values += size
    if piece:
        yield piece
