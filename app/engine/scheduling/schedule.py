"""What one step is to do: the plan that the scheduler makes and the adapter writer and the batch builder carry out.

In: the scheduler's decisions. Out: frozen values. Rule: `items` hold their blocks, and a reference on their adapter's
rows, before anybody sees the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from app.engine.adapters.adapter import LoraAdapter
from app.engine.errors import AdapterPoolFull
from app.engine.sequence import Sequence


class AdapterWrite(NamedTuple):
    """Copy an adapter's weights into rows from `row_start` and point `adapter_slot` at them, for a tenant.

    `sequence` is the one that asked for it; None: nobody's request did.
    """

    adapter_slot: int
    row_start: int
    adapter: LoraAdapter
    tenant_id: str
    sequence: Sequence | None = None


class Refusal(NamedTuple):
    """No sequence of this adapter can start, for this reason."""

    digest: str
    error: AdapterPoolFull


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: how many tokens of which sequences (neighbours share an adapter), after which writes.

    `refusals`: adapters whose waiting sequences are to be ended.
    """

    items: list[tuple[Sequence, int]]
    adapter_writes: list[AdapterWrite]
    preempted: list[Sequence]
    refusals: list[Refusal] = field(default_factory=list)
