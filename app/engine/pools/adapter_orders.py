"""What is asked of an engine's adapters without a request: drops and brings, and who waits for them.

In: orders, as the engine takes them from its inbox. Out: their answers, each given once: the result, or why it
cannot be had. A drop waits for its adapter's last sequence, or until somebody brings it again; a bring waits for
rows that sequences in flight hold, and never for what is kept. The engine's thread calls everything here; `refuse`
alone may be called by whoever took an order that this module has not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from app.engine.adapters.card import AdapterRef
from app.engine.adapters.lora import LoraAdapter
from app.engine.errors import AdapterError, EngineFailure, NotReady
from app.engine.pools.adapter_pool import AdapterGrant, AdapterPool


@dataclass(frozen=True, slots=True)
class Drop:
    """Free an adapter's rows; answered with how many were freed."""

    digest: str
    answer: Future[int]


@dataclass(frozen=True, slots=True)
class Bring:
    """Write an adapter, for `ref`'s tenant; answered when it is resident."""

    adapter: LoraAdapter
    ref: AdapterRef
    answer: Future[None]

    @property
    def digest(self) -> str:
        return self.adapter.card.digest


class AdapterOrders:
    """Orders that were taken and not answered yet, by digest."""

    def __init__(self, adapters: AdapterPool) -> None:
        self._adapters = adapters
        self._drops: dict[str, list[Drop]] = {}
        self._brings: dict[str, list[Bring]] = {}

    @property
    def num_bringing(self) -> int:
        """Adapters that wait for rows."""
        return len(self._brings)

    def take(self, order: Drop | Bring) -> None:
        """Answer this order later. A drop that nobody waits for any more is carried out all the same."""
        is_awaited = order.answer.set_running_or_notify_cancel()
        if isinstance(order, Drop):
            waiting = self._drops.setdefault(order.digest, [])
            if is_awaited:
                waiting.append(order)
        elif is_awaited:
            self._brings.setdefault(order.digest, []).append(order)
            for drop in self._drops.pop(order.digest, ()):  # whoever asked last is obeyed: it stays
                drop.answer.set_result(0)

    def finish_drops(self, num_live_of: Callable[[str], int]) -> None:
        """Free the rows of adapters without live sequences."""
        for digest in [digest for digest in self._drops if not num_live_of(digest)]:
            num_rows = self._adapters.drop(digest)
            for drop in self._drops.pop(digest):
                drop.answer.set_result(num_rows)

    def bring(self, write: Callable[[AdapterGrant, Bring], None]) -> bool:
        """Bring what needs no write, and write at most one adapter; whether one was tried.

        `write` may raise AdapterError, which is that adapter's trouble alone. Those without room keep waiting.
        """
        for digest, waiting in list(self._brings.items()):
            first = waiting[0]
            card = first.adapter.card
            error: Exception | None = None
            grant = None
            try:
                self._adapters.check_room(first.ref.name, digest, card.max_rank, card.extra_bytes)
                grant = self._adapters.acquire(digest, card.max_rank, card.extra_bytes, card.size_bytes)
                if grant is None:
                    self._adapters.reserve(digest, card.max_rank, card.extra_bytes)
                    continue
                if grant.needs_write:
                    write(grant, first)
            except (AdapterError, NotReady) as refused:
                error = refused
                self._adapters.cancel_reservation(digest)
            if grant is not None:
                self._adapters.release(digest)
                if error is not None:
                    self._adapters.drop(digest)
            for bring in self._brings.pop(digest):
                if error is None:
                    bring.answer.set_result(None)
                else:
                    bring.answer.set_exception(error)
            if grant is not None and grant.needs_write:
                return True
        return False

    def refuse_all(self, failure: EngineFailure) -> None:
        """Answer everything that was taken with the failure."""
        for waiting in (self._drops, self._brings):
            for orders in waiting.values():
                for order in orders:
                    order.answer.set_exception(failure)
            waiting.clear()


def refuse(order: Drop | Bring, failure: EngineFailure) -> None:
    """Answer an order that is never taken."""
    if order.answer.set_running_or_notify_cancel():
        order.answer.set_exception(failure)
