"""The store's process: no call that waits holds up another, whatever hangs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.deployments.replica import adapter_fetcher
from app.deployments.store import service as service_module
from app.deployments.store.service import FETCH_WAIT_S, MAX_WAITING_FETCHES, StoreService
from app.engine.adapters.card import AdapterRef
from app.engine.errors import AdapterFormatError


class Bytes:
    """Adapters that come when a test says so."""

    def __init__(self) -> None:
        self.here: dict[str, str | Exception] = {}
        self.waits_s: list[float] = []
        self.expected: list[str] = []
        self.gate = asyncio.Event()

    async def try_fetch(self, ref: AdapterRef, wait_s: float, *, again: bool = False) -> str | None:  # noqa: ARG002
        self.waits_s.append(wait_s)
        found = self.here.get(ref.digest)
        if found is None:
            await asyncio.sleep(0 if wait_s == 0 else 60)
        if isinstance(found, Exception):
            raise found
        return found

    async def prefetch(self, ref: AdapterRef) -> None:
        self.expected.append(ref.digest)
        await self.gate.wait()


def ref(digest: str) -> AdapterRef:
    return AdapterRef(digest, digest, "t", uri=digest)


def make(store: Bytes) -> tuple[StoreService[str], list[int]]:
    calls: list[int] = []
    parts: Any = SimpleNamespace(registry=None, registry_service=None, host_cache=store, uploads=None)
    return StoreService(parts, lambda: calls.append(1)), calls


async def test_fetches_of_what_hangs_are_held_shortly_and_no_more_than_so_many() -> None:
    store = Bytes()
    service, calls = make(store)
    hanging = [asyncio.create_task(service.fetch(ref(f"d{index}"))) for index in range(MAX_WAITING_FETCHES + 50)]
    async with asyncio.timeout(60):
        while not all(task.done() for task in hanging[MAX_WAITING_FETCHES:]):
            await asyncio.sleep(0)
    assert store.waits_s == [FETCH_WAIT_S] * MAX_WAITING_FETCHES + [0.0] * 50
    assert [task.done() for task in hanging] == [False] * MAX_WAITING_FETCHES + [True] * 50
    store.here["good"] = "handle"
    assert await service.fetch(ref("good")) == "handle"
    assert len(calls) == MAX_WAITING_FETCHES + 51, "every call shows that somebody is there"
    for task in hanging:
        task.cancel()


async def test_expecting_returns_at_once_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_PREFETCHES", 3)
    store = Bytes()
    service, _ = make(store)
    for index in range(5):
        await service.prefetch(ref(f"d{index}"))
    await asyncio.sleep(0)
    assert store.expected == ["d0", "d1", "d2"]
    store.gate.set()


async def test_a_replica_asks_until_it_is_there_or_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_fetcher, "FIRST_PAUSE_S", 0.001)
    asked: list[bool] = []
    answers: list[Any] = [None, None, "handle", None, AdapterFormatError("is broken")]

    async def fetch(_: AdapterRef, again: bool = False) -> Any:
        asked.append(again)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    store = cast(Any, SimpleNamespace(fetch=fetch))
    assert await adapter_fetcher.fetch_packed(store, ref("d")) == cast(Any, "handle")
    with pytest.raises(AdapterFormatError):
        await adapter_fetcher.fetch_packed(store, ref("d"))
    assert asked == [False, True, True, False, True]
