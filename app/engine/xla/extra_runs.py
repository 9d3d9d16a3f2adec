"""Which floats of a device's memory hold what an adapter has beside its rank rows: one run per adapter slot.

In: sizes. Out: where each run begins, and, where free floats lie scattered, the moves that put them together. Float 0
is never given away: a place of 0 means that there is nothing. Moving floats is the caller's job.
"""

from __future__ import annotations

from typing import NamedTuple

from app.engine.errors import AdapterTooLarge


class Move(NamedTuple):
    """Copy `size` floats from `source` down to `target`; the two may overlap."""

    adapter_slot: int
    source: int
    target: int
    size: int


class ExtraRuns:
    """Runs [start, start + size) by adapter slot, none of which overlap."""

    def __init__(self, num_floats: int) -> None:
        self._num_floats = num_floats
        self._runs: dict[int, tuple[int, int]] = {}

    def take(self, adapter_slot: int, size: int) -> tuple[int, list[Move]]:
        """A run for a slot that has none, and the moves to be made first, in this order.

        Raises AdapterTooLarge if so many floats are not free.
        """
        assert adapter_slot not in self._runs
        held = sum(length for _, length in self._runs.values())
        if held + size > self._num_floats:
            raise AdapterTooLarge(
                f"an adapter needs {4 * size} bytes beside its rank rows but {4 * held} of {4 * self._num_floats} are "
                "taken; raise engine.adapter_extra_bytes"
            )
        start, moves = 1, []
        for first, length in sorted(self._runs.values()):
            if first - start >= size:
                break
            start = first + length
        if start + size > 1 + self._num_floats:
            moves = self._compact()
            start = 1 + held
        self._runs[adapter_slot] = start, size
        return start, moves

    def release(self, adapter_slot: int) -> None:
        """Free the slot's run, if it has one."""
        self._runs.pop(adapter_slot, None)

    def _compact(self) -> list[Move]:
        moves, at = [], 1
        for adapter_slot, (first, length) in sorted(self._runs.items(), key=lambda item: item[1]):
            if first > at:
                moves.append(Move(adapter_slot, first, at, length))
                self._runs[adapter_slot] = at, length
            at += length
        return moves
