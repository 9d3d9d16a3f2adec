"""The LoRA pool of a CPU engine: the memory of rank rows, the decoder's view of it, and the write of an adapter.

A rank row is as much memory as one row of every module takes in float32. An adapter's matrices lie one after the other
from its first row on, and tables of addresses say where each is. All targets are in one order (`targets_of` the linear
modules), and a linear module's part of the tables is that of its targets. Rows of experts and of MLA heads lie in
memory that is allocated when their adapter is written and freed when its slot is released; `AdapterCard.extra_bytes`
counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.adapter_layout import AdapterLayout, ExpertMatrices, row_bytes
from app.engine.cpu.decoder import AdapterTables
from app.engine.cpu.encoder import EncoderTables
from app.engine.cpu.lora_views import LoraView
from app.engine.cpu.mla import MlaTables
from app.engine.cpu.moe import MoeTables
from app.engine.models.linear_modules import (
    LATENT_KEYS,
    LATENT_VALUES,
    LinearModule,
    StackedModule,
    paged_modules,
    stacked_modules,
    targets_of,
)
from app.engine.models.spec import ModelSpec
from app.kernels.machine.prefault import PagePrefaulter
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.cpu import PANEL
from app.kernels.moe_lora.cpu import ExpertRows
from app.kernels.sgmv.adapter_copy import RANK, TO_A, TO_B, Packing, copy_matrices, matrices, packing
from app.kernels.sgmv.prefetch import NextShrink

#: Linear module -> the targets whose shrinks come next, which it prefetches: at most three, side by side in the order
#: of targets. o is the smallest product and gate's and up's the largest shrinks: gate is prefetched before o.
_PREFETCHED = {
    "qkv": ("o_proj", "gate_proj"),
    "o": ("up_proj",),
    "gate_up": ("down_proj",),
    "down": ("q_proj", "k_proj", "v_proj"),
}
_PREFETCHED_ENCODER = {
    "qkv": ("attention.output.dense",),
    "o": ("intermediate.dense",),
    "up": ("output.dense",),
    "down": ("query", "key", "value"),
}
#: The same in models with experts: what comes next is in the same layers, or known when experts are chosen.
_PREFETCHED_MOE = {"qkv": ("o_proj",), "gate_up": ("down_proj",)}


#: Memory of rank rows is taken as it is used, and so much ahead.
AHEAD_BYTES = 64 << 20


class LoraMemory:
    """One set of tables for all adapters, and their experts' tables."""

    def __init__(self, spec: ModelSpec, num_rows: int, num_slots: int) -> None:
        singles = [one for one in stacked_modules(spec) if one.module.has_rank_rows]
        self._targets = targets_of(one.module for one in singles)
        self._row_bytes = row_bytes(spec)
        #: Every adapter's rank rows, [num_rows * row_bytes].
        self.memory = np.zeros(num_rows * self._row_bytes, np.uint8)
        self._pages = PagePrefaulter([self.memory], AHEAD_BYTES)
        shape = (len(spec.layers), num_slots, len(self._targets))
        self._a, self._b = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._ranks = np.zeros(shape, np.int32)
        #: [S], by adapter slot: whether its rows take two bytes per value.
        self.in_bf16 = np.zeros(num_slots, np.bool_)
        self._depths = np.array([one.module.d_in for one in singles for _ in one.module.targets])
        self._num_panels = np.array([width // PANEL for one in singles for width in one.module.padded_widths(PANEL)])
        mixed = paged_modules(spec)
        self._experts = MoeLoraMemory(mixed, num_slots)
        prefetched = _PREFETCHED_MOE if mixed else _PREFETCHED
        if spec.encoder is not None:
            prefetched = _PREFETCHED_ENCODER
        rows = {one.module.name: self._module_rows(one.module, prefetched) for one in singles}
        #: `AdapterTables`, or an encoder's `EncoderTables`.
        self.tables: Any = self._decoder_tables(rows) if spec.encoder is None else EncoderTables(**rows)

    def widest(self, adapter_slots: NDArray[np.int64]) -> int:
        """The largest rank of these slots' adapters on modules that every token uses."""
        return int(self._ranks[:, adapter_slots].max(initial=0))

    def widest_of_experts(self, adapter_slots: NDArray[np.int64]) -> int:
        """The largest rank on experts; 0 if none of these adapters changes an expert."""
        return self._experts.widest(adapter_slots)

    def write(self, team: ThreadTeam, adapter_slot: int, row_start: int, rows: AdapterLayout) -> None:
        """Write one adapter's rows, ranks and addresses, from `row_start` on."""
        copy_tasks, in_bf16 = self._write(team, rows.packing, row_start)
        self._ranks[:, adapter_slot] = rows.ranks
        where = rows.matrices.layers, adapter_slot, rows.matrices.modules
        self._a[where], self._b[where] = copy_tasks[:, TO_A], copy_tasks[:, TO_B]
        self.in_bf16[adapter_slot] = in_bf16
        self._experts.write(team, adapter_slot, rows.experts)

    def release(self, adapter_slot: int) -> None:
        """Free the memory of the slot's experts."""
        self._experts.release(adapter_slot)

    def trim(self, kept_rows: Collection[tuple[int, int]], should_stop: Callable[[], bool]) -> None:
        """Give back the memory of other rank rows; see `PagePrefaulter.trim`."""
        size = self._row_bytes
        self._pages.trim([(first * size, end * size) for first, end in kept_rows], should_stop)

    def close(self) -> None:
        """Take no more memory."""
        self._pages.stop()

    def warm_up(self, team: ThreadTeam) -> None:
        """Compile what `write` calls, by writing row 0; it is written again before it is read."""
        source = matrices([(0, 0, np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))])
        self._write(team, packing(source), 0)

    def _write(self, team: ThreadTeam, packed: Packing, row_start: int) -> tuple[NDArray[np.int64], bool]:
        """The copy tasks that were carried out, and whether the rows are in bfloat16: all modules' or none."""
        first = row_start * self._row_bytes
        self._pages.use(first + packed.num_bytes)
        assert first + packed.num_bytes <= self.memory.nbytes, "an adapter's rows end before the memory does"
        copy_tasks, too_fine = packed.at(self.memory.ctypes.data + first), np.zeros(1, np.bool_)
        team.run(copy_matrices, 2, copy_tasks, too_fine)
        return copy_tasks, not too_fine[0]

    def _module_rows(self, module: LinearModule, prefetched: Mapping[str, tuple[str, ...]]) -> LoraView:
        own_targets, next_targets = self._slice(module.targets), self._slice(prefetched.get(module.name, ()))
        return self._view(own_targets, next_targets)

    def _view(self, own_targets: slice, next_targets: slice) -> LoraView:
        """The tables of neighbouring modules, and those whose shrink they prefetch."""
        upcoming = NextShrink(
            self._a[:, :, next_targets], self._ranks[:, :, next_targets], self._depths[next_targets], self.in_bf16
        )
        a, b, ranks = self._a[:, :, own_targets], self._b[:, :, own_targets], self._ranks[:, :, own_targets]
        return LoraView(a, b, ranks, self._num_panels[own_targets], self.in_bf16, own_targets.start, upcoming)

    def _slice(self, targets: tuple[str, ...]) -> slice:
        """The indices of targets that lie side by side."""
        first = self._targets.index(targets[0]) if targets else 0
        return slice(first, first + len(targets))

    def _decoder_tables(self, rows: Mapping[str, LoraView]) -> AdapterTables:
        return AdapterTables(
            rows.get("qkv", self._absent(prefetches=True)),
            rows["o"],
            rows.get("gate_up", self._absent(prefetches=True)),
            rows.get("down", self._absent()),
            self._moe_tables(rows) if "router" in rows else None,
            self._mla_tables(rows) if "latent_a" in rows else None,
        )

    def _absent(self, *, prefetches: bool = False) -> LoraView:
        """A placeholder for a linear module that no layer has; never read. `prefetches`: whether it has the type of
        one that prefetches the next."""
        return self._view(slice(0, 1), slice(0, int(prefetches)))

    def _moe_tables(self, rows: Mapping[str, LoraView]) -> MoeTables:
        return MoeTables(
            rows["router"],
            rows.get("shared_gate", self._absent()),
            rows.get("shared_gate_up", self._absent()),
            rows.get("shared_down", self._absent()),
            self._experts.tables["experts_gate_up"],
            self._experts.tables["experts_down"],
        )

    def _mla_tables(self, rows: Mapping[str, LoraView]) -> MlaTables:
        return MlaTables(
            rows.get("query", self._absent()),
            rows.get("query_a", self._absent()),
            rows.get("query_b", self._absent()),
            rows["latent_a"],
            self._experts.tables[LATENT_KEYS.name],
            self._experts.tables[LATENT_VALUES.name],
        )


class MoeLoraMemory:
    """Rank rows of experts and of MLA heads (`paged_modules`), by layer, slot and expert."""

    def __init__(self, stacked: tuple[StackedModule, ...], num_slots: int) -> None:
        """stacked: the linear modules with experts, in the order of `ExpertMatrices.linear_modules`."""
        in_bf16 = np.zeros(num_slots, np.bool_)
        #: By the linear module's name.
        self.tables: dict[str, ExpertRows] = {}
        for module, layers in stacked:
            shape = (len(layers), num_slots, len(module.experts), len(module.targets))
            at = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            self.tables[module.name] = ExpertRows(*at, np.zeros(shape, np.int32), in_bf16)
        self._in_bf16 = in_bf16
        self._held: dict[int, NDArray[np.uint8]] = {}
        self._widest = np.zeros(num_slots, np.int64)

    def widest(self, adapter_slots: NDArray[np.int64]) -> int:
        """The largest rank of these slots' experts; 0 where none changes an expert."""
        return int(self._widest[adapter_slots].max(initial=0))

    def release(self, adapter_slot: int) -> None:
        """Free the slot's rows."""
        if self._held.pop(adapter_slot, None) is not None:
            self._widest[adapter_slot] = 0
            for rows in self.tables.values():
                rows.ranks[:, adapter_slot] = 0

    def write(self, team: ThreadTeam, adapter_slot: int, source: ExpertMatrices | None) -> None:
        """Replace the slot's rows by those of `source`."""
        self.release(adapter_slot)
        if source is None:
            return
        memory = np.empty(source.packing.num_bytes, np.uint8)
        copy_tasks, in_bf16 = source.packing.at(memory.ctypes.data), source.packing.in_bf16
        too_fine = np.array([not in_bf16])
        team.run(copy_matrices, 2, copy_tasks, too_fine)
        assert too_fine[0] != in_bf16, "values saved in bfloat16 fit into two bytes"
        self._held[adapter_slot] = memory
        self._in_bf16[adapter_slot] = in_bf16
        self._widest[adapter_slot] = copy_tasks[:, RANK].max()
        for index, rows in enumerate(self.tables.values()):
            mine = source.linear_modules == index
            where = (source.stacked_layers[mine], adapter_slot, source.experts[mine], source.modules[mine])
            rows.a[where], rows.b[where], rows.ranks[where] = copy_tasks[mine][:, [TO_A, TO_B, RANK]].T
