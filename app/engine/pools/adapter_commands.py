"""Load and unload commands: adapters that are written or freed without a request.

An unload waits for its adapter's last sequence, or until the adapter is loaded again. A load waits for rows that
running sequences hold, but never for pinned adapters' rows. Every command is answered once. All methods run on the
engine's thread; `refuse` may be called by any thread for a command that was not added.
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
    """Free an adapter's rows; the result is the number of rows freed."""

    digest: str
    answer: Future[int]


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Write an adapter, for `ref`'s tenant; the result is the number of bytes written, once it is resident."""

    adapter: LoraAdapter
    ref: AdapterRef
    answer: Future[int]

    @property
    def digest(self) -> str:
        return self.adapter.card.digest


class LoadReady(NamedTuple):
    """A load command whose slot and rows are assigned and not written yet."""

    command: LoadCommand
    adapter_slot: int
    row_start: int


class AdapterCommands:
    """Unanswered commands by digest."""

    def __init__(
        self,
        adapters: AdapterPool,
        extra_bytes_of: Callable[[LoraAdapter], int],
        rank_rows_of: Callable[[LoraAdapter], int],
    ) -> None:
        """`extra_bytes_of`, `rank_rows_of`: see `BackendLimits`."""
        self._adapters, self._extra_bytes_of, self._rank_rows_of = adapters, extra_bytes_of, rank_rows_of
        self._unloads: dict[str, list[UnloadCommand]] = {}
        self._loads: dict[str, list[LoadCommand]] = {}
        self.load_ready: LoadReady | None = None

    @property
    def num_waiting(self) -> int:
        """Adapters with an unanswered command."""
        return len(self._unloads) + len(self._loads)

    def add(self, command: UnloadCommand | LoadCommand) -> None:
        """Accept a command. A cancelled unload is carried out all the same."""
        is_awaited = command.answer.set_running_or_notify_cancel()
        if isinstance(command, UnloadCommand):
            waiting = self._unloads.setdefault(command.digest, [])
            if is_awaited:
                waiting.append(command)
        elif is_awaited:
            self._loads.setdefault(command.digest, []).append(command)
            for unload in self._unloads.pop(command.digest, ()):  # the last command wins: the adapter stays
                unload.answer.set_result(0)

    def settle(self, num_live_of: Callable[[str], int]) -> None:
        """Free unloaded adapters that have no live sequences, then assign rows to one load.

        That load is `load_ready` until `finish` reports its write. Loads that need no write, or never have room, are
        answered; those without room now keep waiting.
        """
        for digest in [digest for digest in self._unloads if not num_live_of(digest)]:
            num_rows = self._adapters.unload(digest)
            for unload in self._unloads.pop(digest):
                unload.answer.set_result(num_rows)
        assert self.load_ready is None, "one load after the other"
        for digest in list(self._loads):
            self.load_ready = self._grant(digest)
            if self.load_ready is not None:
                break

    def finish(self, error: AdapterError | None) -> None:
        """Report the write of the ready load. After an error the caller unloads the adapter's rows."""
        assert self.load_ready is not None, "no load is ready"
        card = self.load_ready.command.adapter.card
        self.load_ready = None
        self._adapters.release(card.digest)
        self._answer(card.digest, error, card.size_bytes)

    def refuse_all(self, failure: EngineFailure) -> None:
        """Answer all commands with the failure."""
        for waiting in (self._unloads, self._loads):
            for commands in waiting.values():
                for command in commands:
                    command.answer.set_exception(failure)
            waiting.clear()

    def _grant(self, digest: str) -> LoadReady | None:
        """Assign rows if the adapter needs them and there are some; else its loads wait or are answered."""
        first = self._loads[digest][0]
        card = first.adapter.card
        extra_bytes, num_needed = self._extra_bytes_of(first.adapter), self._rank_rows_of(first.adapter)
        try:
            self._adapters.check_room(digest, num_needed, extra_bytes)
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
        """Answer an adapter's loads; only the first gets the number of bytes written."""
        for index, command in enumerate(self._loads.pop(digest)):
            if error is None:
                command.answer.set_result(0 if index else written_bytes)
            else:
                command.answer.set_exception(error)


def refuse(command: UnloadCommand | LoadCommand, failure: EngineFailure) -> None:
    """Answer a command that was never added."""
    if command.answer.set_running_or_notify_cancel():
        command.answer.set_exception(failure)
