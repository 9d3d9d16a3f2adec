"""Rank rows of experts, and of heads of latents, on a CPU: an adapter's lie in memory of its own.

In: an adapter's experts, worked out by `PreparedRows`, and its slot. Out: addresses by layer, slot and expert for
`app.kernels.moe_lora`. Memory is allocated when an adapter is written and freed when its slot is released; how much may
be held is the engine's business (`AdapterCard.extra_bytes`, which counts these rows).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.cpu.rows import ExpertMatrices
from app.engine.models.products import Stacked
from app.kernels.machine.team import Team
from app.kernels.moe_lora.cpu import ExpertRows
from app.kernels.sgmv.writing import RANK, TO_A, TO_B, write_plan


class ExpertRowMemory:
    """Of the products that experts and heads of latents have (`paged_products`)."""

    def __init__(self, stacked: tuple[Stacked, ...], num_slots: int) -> None:
        """stacked: the products that have experts, in the order of `ExpertMatrices.products`."""
        in_bf16 = np.zeros(num_slots, np.bool_)
        #: By the product's name.
        self.tables: dict[str, ExpertRows] = {}
        for product, layers in stacked:
            shape = (len(layers), num_slots, len(product.experts), len(product.targets))
            at = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            self.tables[product.name] = ExpertRows(*at, np.zeros(shape, np.int32), in_bf16)
        self._in_bf16 = in_bf16
        self._held: dict[int, NDArray[np.uint8]] = {}
        self._widest = np.zeros(num_slots, np.int64)

    def held_bytes(self, adapter_slot: int) -> int:
        """Bytes of the slot's rows."""
        return self._held[adapter_slot].nbytes if adapter_slot in self._held else 0

    def widest(self, adapter_slots: NDArray[np.int64]) -> int:
        """The largest rank of these slots' experts; 0 where none changes an expert."""
        return int(self._widest[adapter_slots].max(initial=0))

    def release(self, adapter_slot: int) -> None:
        """Forget the slot's rows and free their memory."""
        if self._held.pop(adapter_slot, None) is not None:
            self._widest[adapter_slot] = 0
            for rows in self.tables.values():
                rows.ranks[:, adapter_slot] = 0

    def write(self, team: Team, adapter_slot: int, source: ExpertMatrices | None) -> None:
        """Take the slot's rows from `source`, dropping what was there."""
        self.release(adapter_slot)
        if source is None:
            return
        memory = np.empty(source.packing.num_bytes, np.uint8)
        plan, in_bf16 = source.packing.at(memory.ctypes.data), source.packing.in_bf16
        too_fine = np.array([not in_bf16])
        team.run(write_plan, 2, plan, too_fine)
        assert too_fine[0] != in_bf16, "what is saved in bfloat16 fits two bytes"
        self._held[adapter_slot] = memory
        self._in_bf16[adapter_slot] = in_bf16
        self._widest[adapter_slot] = plan[:, RANK].max()
        for index, rows in enumerate(self.tables.values()):
            mine = source.products == index
            where = (source.places[mine], adapter_slot, source.experts[mine], source.modules[mine])
            rows.a[where], rows.b[where], rows.ranks[where] = plan[mine][:, [TO_A, TO_B, RANK]].T
