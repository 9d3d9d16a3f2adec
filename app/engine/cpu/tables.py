"""Rank rows of a CPU engine: the memory they lie in, the decoder's view of it, and the write of an adapter.

In: the base's products, and what `PreparedRows` has worked out of an adapter. Out: `decoder.AdapterTables`. All targets
lie in one order (`targets_of` the products), and a product's tables are those of its targets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.decoder import AdapterTables, ProductRows
from app.engine.cpu.encoder import EncoderTables
from app.engine.cpu.rows import AdapterRows
from app.engine.models.products import targets_of, uniform_products
from app.engine.models.spec import ModelSpec
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import PANEL
from app.kernels.sgmv.cpu import RANK_PANEL, RowPlaces
from app.kernels.sgmv.fetching import NextShrink
from app.kernels.sgmv.writing import Matrices, WritePlans, matrices, write_plan

#: Product -> the targets whose shrinks come next, which it asks memory for on its way: at most three, side by side in
#: the order of targets. o is the smallest product and gate's and up's the largest shrinks: gate is asked for before o.
_ASKED_FOR = {
    "qkv": ("o_proj", "gate_proj"),
    "o": ("up_proj",),
    "gate_up": ("down_proj",),
    "down": ("q_proj", "k_proj", "v_proj"),
}
_ENCODER_ASKED_FOR = {
    "qkv": ("attention.output.dense",),
    "o": ("intermediate.dense",),
    "up": ("output.dense",),
    "down": ("query", "key", "value"),
}


class RankRowMemory:
    """One set of tables for all adapters."""

    def __init__(self, spec: ModelSpec, num_rows: int, num_slots: int) -> None:
        products = uniform_products(spec)
        targets = targets_of(products)
        num_layers = len(spec.layers)
        inputs = [product.d_in for product in products for _ in product.targets]
        outputs = [width for product in products for width in product.padded_widths(PANEL)]
        self._a = [np.zeros((num_layers, num_rows // RANK_PANEL, size, RANK_PANEL), np.float32) for size in inputs]
        self._b = [np.zeros((num_layers, num_rows, size), np.float32) for size in outputs]
        self._ranks = np.zeros((num_layers, num_slots, len(targets)), np.int32)
        self._places = RowPlaces(np.zeros(num_slots, np.int64), np.zeros(num_slots, np.bool_))
        self._plans = WritePlans(self._a, self._b)

        def of(first: str, count: int) -> slice:
            return slice(targets.index(first), targets.index(first) + count)

        rows = {}
        asked_for = _ASKED_FOR if spec.encoder is None else _ENCODER_ASKED_FOR
        for product in products:
            own = of(product.targets[0], len(product.targets))
            coming = of(asked_for[product.name][0], len(asked_for[product.name]))
            a = self._a[coming]
            upcoming: Any = NextShrink((*a, *a[-1:] * (3 - len(a))), self._ranks[:, :, coming])  # type: ignore[arg-type]
            rows[product.name] = ProductRows(
                tuple(self._a[own]), tuple(self._b[own]), self._ranks[:, :, own], own.start, upcoming
            )
        #: `AdapterTables`, or an encoder's `EncoderTables`.
        self.tables: Any = (AdapterTables if spec.encoder is None else EncoderTables)(**rows, places=self._places)

    @property
    def memory(self) -> tuple[NDArray[np.float32], ...]:
        """Every array that holds rank rows."""
        return (*self._a, *self._b)

    def widest(self, adapter_slots: NDArray[np.int64]) -> int:
        """The largest rank of these slots' adapters."""
        return int(self._ranks[:, adapter_slots].max(initial=0))

    def write(self, team: Team, adapter_slot: int, row_start: int, rows: AdapterRows) -> None:
        """Rows, ranks and place of one adapter."""
        in_bf16 = self._write(team, rows.matrices, row_start)
        self._ranks[:, adapter_slot] = rows.ranks
        self._places.starts[adapter_slot] = row_start
        self._places.in_bf16[adapter_slot] = in_bf16

    def warm_up(self, team: Team) -> None:
        """Compile what `write` calls: row 0 is written, which nobody reads before writing it anew."""
        nothing = np.zeros((1, self._a[0].shape[2]), np.float32), np.zeros((1, self._b[0].shape[2]), np.float32)
        self._write(team, matrices([(0, 0, *nothing)]), 0)

    def _write(self, team: Team, source: Matrices, row_start: int) -> bool:
        """See `WritePlans.plan`; whether the rows are in bfloat16: all modules' or none."""
        too_fine = np.zeros(1, np.bool_)
        team.run(write_plan, 2, self._plans.plan(source, row_start), too_fine)
        return not too_fine[0]
