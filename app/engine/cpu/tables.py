"""Rank rows of a CPU engine: the memory they lie in, the decoder's view of it, and the write of an adapter.

In: the base's products, and what `PreparedRows` has worked out of an adapter. Out: `decoder.AdapterTables`. All targets
lie in one order (`targets_of` the products), and a product's tables are those of its targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.decoder import AdapterTables
from app.engine.cpu.encoder import EncoderTables
from app.engine.cpu.expert_rows import ExpertRowMemory
from app.engine.cpu.experts import ExpertTables
from app.engine.cpu.latents import LatentTables
from app.engine.cpu.product_rows import Floats, ProductRows
from app.engine.cpu.rows import AdapterRows
from app.engine.models.products import (
    LATENT_KEYS,
    LATENT_VALUES,
    Product,
    paged_products,
    stacked_products,
    targets_of,
)
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
#: The same where layers differ: what comes next is of the same layers, or known when experts are chosen.
_ASKED_FOR_BESIDE_EXPERTS = {"qkv": ("o_proj",), "gate_up": ("down_proj",)}


class RankRowMemory:
    """One set of tables for all adapters, and those of adapters' experts."""

    def __init__(self, spec: ModelSpec, num_rows: int, num_slots: int) -> None:
        singles = [one for one in stacked_products(spec) if one.product.has_rank_rows]
        self._targets = targets_of(one.product for one in singles)
        self._a: list[Floats] = []
        self._b: list[Floats] = []
        for product, layers in singles:
            for width in product.padded_widths(PANEL):
                shape = (len(layers), num_rows // RANK_PANEL, product.d_in, RANK_PANEL)
                self._a.append(np.zeros(shape, np.float32))
                self._b.append(np.zeros((len(layers), num_rows, width), np.float32))
        self._ranks = np.zeros((len(spec.layers), num_slots, len(self._targets)), np.int32)
        self._places = RowPlaces(np.zeros(num_slots, np.int64), np.zeros(num_slots, np.bool_))
        self._plans = WritePlans(self._a, self._b)
        mixed = paged_products(spec)
        self._experts = ExpertRowMemory(mixed, num_slots)
        asked_for = _ASKED_FOR_BESIDE_EXPERTS if mixed else _ASKED_FOR
        if spec.encoder is not None:
            asked_for = _ENCODER_ASKED_FOR
        rows = {one.product.name: self._product_rows(one.product, asked_for) for one in singles}
        #: `AdapterTables`, or an encoder's `EncoderTables`.
        self.tables: Any = (
            self._decoder_tables(rows) if spec.encoder is None else EncoderTables(**rows, places=self._places)
        )

    @property
    def memory(self) -> tuple[Floats, ...]:
        """Every array that holds rank rows for all adapters."""
        return (*self._a, *self._b)

    def widest(self, adapter_slots: NDArray[np.int64]) -> int:
        """The largest rank of these slots' adapters on modules that every token uses."""
        return int(self._ranks[:, adapter_slots].max(initial=0))

    def widest_of_experts(self, adapter_slots: NDArray[np.int64]) -> int:
        """The same on experts; 0 where none of these adapters changes an expert."""
        return self._experts.widest(adapter_slots)

    def write(self, team: Team, adapter_slot: int, row_start: int, rows: AdapterRows) -> None:
        """Rows, ranks and place of one adapter."""
        in_bf16 = self._write(team, rows.matrices, row_start)
        self._ranks[:, adapter_slot] = rows.ranks
        self._places.starts[adapter_slot] = row_start
        self._places.in_bf16[adapter_slot] = in_bf16
        self._experts.write(team, adapter_slot, rows.experts)

    def release(self, adapter_slot: int) -> None:
        """Free what the slot's adapter holds for its experts."""
        self._experts.release(adapter_slot)

    def warm_up(self, team: Team) -> None:
        """Compile what `write` calls: row 0 is written, which nobody reads before writing it anew."""
        nothing = np.zeros((1, self._a[0].shape[2]), np.float32), np.zeros((1, self._b[0].shape[2]), np.float32)
        self._write(team, matrices([(0, 0, *nothing)]), 0)

    def _write(self, team: Team, source: Matrices, row_start: int) -> bool:
        """See `WritePlans.plan`; whether the rows are in bfloat16: all modules' or none."""
        too_fine = np.zeros(1, np.bool_)
        team.run(write_plan, 2, self._plans.plan(source, row_start), too_fine)
        return not too_fine[0]

    def _product_rows(self, product: Product, asked_for: Mapping[str, tuple[str, ...]]) -> ProductRows:
        own, coming = self._slice(product.targets), self._slice(asked_for.get(product.name, ()))
        a = [*self._a[coming], *self._a[:3]][:3]
        upcoming: Any = NextShrink(tuple(a), self._ranks[:, :, coming])  # type: ignore[arg-type]
        return ProductRows(tuple(self._a[own]), tuple(self._b[own]), self._ranks[:, :, own], own.start, upcoming)

    def _slice(self, targets: tuple[str, ...]) -> slice:
        """Places of targets that lie side by side."""
        first = self._targets.index(targets[0]) if targets else 0
        return slice(first, first + len(targets))

    def _decoder_tables(self, rows: Mapping[str, ProductRows]) -> AdapterTables:
        return AdapterTables(
            rows.get("qkv", self._absent(3, asks=True)),
            rows["o"],
            rows.get("gate_up", self._absent(2, asks=True)),
            rows.get("down", self._absent(1)),
            self._places,
            self._expert_tables(rows) if "router" in rows else None,
            self._latent_tables(rows) if "latent_a" in rows else None,
        )

    def _absent(self, num_targets: int, *, asks: bool = False) -> ProductRows:
        """Of a product that no layer has: nobody reads it. `asks`: of the type of one that asks for what comes next."""
        a, b = np.zeros((0, 0, 1, RANK_PANEL), np.float32), np.zeros((0, 0, PANEL), np.float32)
        upcoming = NextShrink((a, a, a), self._ranks[:, :, : int(asks)])
        return ProductRows((a,) * num_targets, (b,) * num_targets, self._ranks[:, :, :num_targets], 0, upcoming)

    def _expert_tables(self, rows: Mapping[str, ProductRows]) -> ExpertTables:
        return ExpertTables(
            rows["router"],
            rows.get("shared_gate", self._absent(1)),
            rows.get("shared_gate_up", self._absent(2)),
            rows.get("shared_down", self._absent(1)),
            self._experts.tables["experts_gate_up"],
            self._experts.tables["experts_down"],
        )

    def _latent_tables(self, rows: Mapping[str, ProductRows]) -> LatentTables:
        return LatentTables(
            rows.get("query", self._absent(1)),
            rows.get("query_a", self._absent(1)),
            rows.get("query_b", self._absent(1)),
            rows["latent_a"],
            self._experts.tables[LATENT_KEYS.name],
            self._experts.tables[LATENT_VALUES.name],
        )
