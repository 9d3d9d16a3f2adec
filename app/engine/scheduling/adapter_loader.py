"""The adapter work of a step: free the extra weights of evicted adapters, then write new adapters to the device.

Sequences whose adapter is not on the device yet are left out of the step. An adapter that cannot be written, or never
has room, ends its own requests only. The pool chooses the rows; the backend moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from app.engine.backend import Backend
from app.engine.errors import AdapterError, PolyloraError
from app.engine.meter import EngineMeter
from app.engine.pools.adapter_commands import AdapterCommands
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.request import TokenChunk
from app.engine.scheduling.live_sequences import LiveSequences
from app.engine.scheduling.schedule import AdapterWrite, Schedule


class AdapterLoader:
    """Keeps one backend's adapter tables in the state that the adapter pool has decided."""

    def __init__(
        self,
        backend: Backend,
        adapters: AdapterPool,
        commands: AdapterCommands,
        sequences: LiveSequences,
        meter: EngineMeter,
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._adapters = adapters
        self._commands = commands
        self._sequences = sequences
        self._meter = meter
        self._clock = clock

    @property
    def has_work(self) -> bool:
        """Whether commands wait, or slots whose extra weights are to be freed."""
        return self._commands.num_waiting > 0 or self._adapters.num_pending_free > 0

    def apply(self, schedule: Schedule) -> tuple[Schedule, list[TokenChunk]]:
        """Update the tables for a step; returns what of it can be computed, and chunks of ended requests.

        Sequences whose adapter is still being written are left out, unless there are no others: then the step waits.
        """
        for adapter_slot in self._adapters.take_pending_free():  # before the writes: a slot may be in use again
            self._backend.release_adapter(adapter_slot)
        refused: dict[str, PolyloraError] = dict(schedule.refusals)
        if (load_ready := self._commands.load_ready) is not None:
            command = load_ready.command
            error = self._write(AdapterWrite(load_ready.adapter_slot, load_ready.row_start, command.adapter))
            if error is not None:
                refused[command.digest] = error
            self._commands.finish(error)
            self._sequences.reopen()
        for write in schedule.adapter_writes:
            if (error := self._write(write)) is not None:
                refused[write.adapter.card.digest] = error
        unready = self._unready(schedule, refused)
        chunks: list[TokenChunk] = []
        for digest, reason in refused.items():
            chunks += self._sequences.end_adapter(digest, reason)
            self._adapters.unload(digest)
        if not refused and not unready:
            return schedule, chunks
        left = [item for item in schedule.items if item[0].adapter_digest not in refused]
        ready = [item for item in left if item[0].adapter_slot not in unready]
        return replace(schedule, items=ready or left), chunks

    def _write(self, write: AdapterWrite) -> AdapterError | None:
        """Write an adapter's rows; returns the error if only this adapter is affected."""
        started_s, size_bytes = self._clock(), write.adapter.card.size_bytes
        try:
            self._backend.write_adapter(write.adapter_slot, write.row_start, write.adapter)
        except AdapterError as error:
            return error
        took_s = self._clock() - started_s
        self._meter.adapter_write_s += took_s
        self._meter.count_adapter_write(size_bytes)
        if write.sequence is not None:
            write.sequence.count_load(size_bytes, took_s)
        return None

    def _unready(self, schedule: Schedule, refused: dict[str, PolyloraError]) -> set[int]:
        """Slots whose adapter is still being written. Adapters whose write failed are added to `refused`."""
        unready = set()
        slots = {sequence.adapter_slot: sequence.adapter_digest for sequence, _ in schedule.items}
        for adapter_slot, digest in slots.items():
            if digest in refused:
                continue
            try:
                if not self._backend.is_ready(adapter_slot):
                    unready.add(adapter_slot)
            except AdapterError as error:
                assert digest is not None, "the base is never written"
                refused[digest] = error
        return unready
