"""The schedule of one step: made by the scheduler, carried out by the adapter loader and the batch builder.

Frozen values. Sequences in `items` already hold their blocks and a reference on their adapter's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from app.engine.adapters.adapter import LoraAdapter
from app.engine.errors import AdapterPoolFull
from app.engine.sequence import Sequence


class AdapterWrite(NamedTuple):
    """Copy an adapter's weights into rows from `row_start` and point `adapter_slot` at them.

    `sequence` caused the write; None for a load command.
    """

    adapter_slot: int
    row_start: int
    adapter: LoraAdapter
    sequence: Sequence | None = None


class Refusal(NamedTuple):
    """The error that ends every waiting sequence of this adapter."""

    digest: str
    error: AdapterPoolFull


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: the tokens to compute per sequence (equal adapters are neighbours), after the adapter writes.

    `refusals`: adapters whose waiting sequences end with an error. `admitted_ids`: requests that wait no more.
    """

    items: list[tuple[Sequence, int]]
    adapter_writes: list[AdapterWrite]
    refusals: list[Refusal]
    admitted_ids: list[str]
