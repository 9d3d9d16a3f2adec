"""What is asked of an engine's adapters without a request: drops and brings, and who waits for them.

In: orders, as the engine takes them from its inbox. Out: their answers, each given once: the result, or why it
cannot be had. A drop waits for its adapter's last sequence, or until somebody brings it again; a bring waits for
rows that sequences in flight hold, and never for pinned adapters' rows. The engine's thread calls everything here;
`refuse` alone may be called by whoever took an order that this module has not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.errors import AdapterError, EngineFailure, NotReady
from app.engine.pools.adapter_pool import AdapterPool


@dataclass(frozen=True, slots=True)
class UnloadCommand:
    """Free an adapter's rows; answered with how many were freed."""

    digest: str
    answer: Future[int]


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Write an adapter, for `ref`'s tenant; answered when it is resident, with how many bytes were written for it."""

    adapter: LoraAdapter
    ref: AdapterRef
    answer: Future[int]

    @property
    def digest(self) -> str:
        return self.adapter.card.digest


class LoadReady(NamedTuple):
    """A bring that has its slot and rows, which are yet to be written."""

    command: LoadCommand
    adapter_slot: int
    row_start: int


class AdapterCommands:
    """Orders that were taken and not answered yet, by digest."""

    def __init__(
        self,
        adapters: AdapterPool,
        extra_bytes_of: Callable[[LoraAdapter], int],
        rank_rows_of: Callable[[LoraAdapter], int],
    ) -> None:
        """extra_bytes_of, rank_rows_of: see `BackendLimits`."""
        self._adapters, self._extra_bytes_of, self._rank_rows_of = adapters, extra_bytes_of, rank_rows_of
        self._unloads: dict[str, list[UnloadCommand]] = {}
        self._loads: dict[str, list[LoadCommand]] = {}
        self.load_ready: LoadReady | None = None

    @property
    def num_waiting(self) -> int:
        """Adapters with an order that is not answered yet."""
        return len(self._unloads) + len(self._loads)

    def take(self, command: UnloadCommand | LoadCommand) -> None:
        """Answer this order later. A drop that nobody waits for any more is carried out all the same."""
        is_awaited = command.answer.set_running_or_notify_cancel()
        if isinstance(command, UnloadCommand):
            waiting = self._unloads.setdefault(command.digest, [])
            if is_awaited:
                waiting.append(command)
        elif is_awaited:
            self._loads.setdefault(command.digest, []).append(command)
            for unload in self._unloads.pop(command.digest, ()):  # whoever asked last is obeyed: it stays
                unload.answer.set_result(0)

    def settle(self, num_live_of: Callable[[str], int]) -> None:
        """Free the rows of adapters that are dropped and have no live sequences; then give one bring its rows.

        That bring is `load_ready` until `finish` says how writing it went. Brings that need no write, or never have room,
        are answered; those without room keep waiting.
        """
        for digest in [digest for digest in self._unloads if not num_live_of(digest)]:
            num_rows = self._adapters.unload(digest)
            for unload in self._unloads.pop(digest):
                unload.answer.set_result(num_rows)
        assert self.load_ready is None, "one bring after the other"
        for digest in list(self._loads):
            self.load_ready = self._grant(digest)
            if self.load_ready is not None:
                break

    def finish(self, error: AdapterError | None) -> None:
        """The granted adapter has been written, or cannot be: then its rows are the caller's to drop."""
        assert self.load_ready is not None, "nothing was granted"
        card = self.load_ready.command.adapter.card
        self.load_ready = None
        self._adapters.release(card.digest)
        self._answer(card.digest, error, card.size_bytes)

    def refuse_all(self, failure: EngineFailure) -> None:
        """Answer everything that was taken with the failure."""
        for waiting in (self._unloads, self._loads):
            for commands in waiting.values():
                for command in commands:
                    command.answer.set_exception(failure)
            waiting.clear()

    def _grant(self, digest: str) -> LoadReady | None:
        """Give the adapter rows, if it needs any and they can be had; else its orders wait or are answered."""
        first = self._loads[digest][0]
        card = first.adapter.card
        extra_bytes, num_needed = self._extra_bytes_of(first.adapter), self._rank_rows_of(first.adapter)
        try:
            self._adapters.check_room(first.ref.name, digest, num_needed, extra_bytes)
            grant = self._adapters.acquire(digest, num_needed, extra_bytes, card.size_bytes, first.ref.tenant_id)
        except (AdapterError, NotReady) as refusal:
            self._adapters.cancel_reservation(digest)
            self._answer(digest, refusal)
            return None
        if grant is None:
            self._adapters.reserve(digest, num_needed, extra_bytes)
            return None
        if not grant.needs_write:
            self._adapters.release(digest)
            self._answer(digest, None)
            return None
        return LoadReady(first, grant.adapter_slot, grant.row_start)

    def _answer(self, digest: str, error: Exception | None, written_bytes: int = 0) -> None:
        """What was written is told once, to the first who asked for it."""
        for index, command in enumerate(self._loads.pop(digest)):
            if error is None:
                command.answer.set_result(0 if index else written_bytes)
            else:
                command.answer.set_exception(error)


def refuse(command: UnloadCommand | LoadCommand, failure: EngineFailure) -> None:
    """Answer an order that is never taken."""
    if command.answer.set_running_or_notify_cancel():
        command.answer.set_exception(failure)
