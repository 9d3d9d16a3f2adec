"""The engine's thread: wakes, sleeps, stops and reports, and leaves no request unanswered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from app.engine import engine_thread
from app.engine.adapters.card import AdapterRef
from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.engine_thread import EngineThread
from app.engine.errors import EngineFailure
from app.engine.request import SamplingParams, TokenChunk
from tests.fakes import FakeBackend, fake_adapter, fake_request, fake_tokens


class Listener:
    """Collects chunks and says when a request has ended."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.failures: list[EngineFailure] = []
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def on_chunks(self, chunks: list[TokenChunk]) -> None:
        with self._changed:
            self.threads.add(threading.get_ident())
            for chunk in chunks:
                self.chunks.setdefault(chunk.request_id, []).append(chunk)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=120)

    def ended(self, *request_ids: str) -> bool:
        return all(self.chunks.get(r) and self.chunks[r][-1].finish_reason for r in request_ids)


def start(listener: Listener, *, fail_at: int | None = None) -> tuple[EngineThread, FakeBackend]:
    backend = FakeBackend(BackendLimits(64, 8, 64, 8, 8))
    backend.fail_at = fail_at
    thread = EngineThread(Engine(backend, EngineConfig()), listener.on_chunks, listener.failures.append)
    thread.start()
    return thread, backend


def endless(max_tokens: int = 400) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def test_requests_from_many_threads_are_answered_on_the_engines_thread() -> None:
    listener = Listener()
    thread, _ = start(listener)
    adapter = fake_adapter("a", 8)
    requests = [fake_request(f"r{i}", [i, 2], adapter if i % 2 else None) for i in range(24)]

    def submit(part: int) -> None:
        for request in requests[part::4]:
            thread.submit(request, adapter if request.adapter else None)
            time.sleep(0.001)

    callers = [threading.Thread(target=submit, args=(part,)) for part in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    listener.wait(lambda: listener.ended(*(request.request_id for request in requests)))
    for request in requests:
        tokens = [token for chunk in listener.chunks[request.request_id] for token in chunk.token_ids]
        assert tokens == [line.token_id for line in fake_tokens(request, adapter if request.adapter else None)]
    assert thread.unload_adapter(adapter.card.digest).result(timeout=120) == 8
    assert thread.stop(timeout_s=120)
    assert len(listener.threads) == 1
    assert listener.failures == []


def test_an_idle_engine_takes_no_steps_and_wakes_at_once() -> None:
    listener = Listener()
    thread, backend = start(listener)
    time.sleep(0.05)
    assert backend.num_forwards == 0
    thread.submit(fake_request("r", [1]))
    listener.wait(lambda: listener.ended("r"))
    forwards = backend.num_forwards
    time.sleep(0.05)
    assert backend.num_forwards == forwards
    assert thread.stop(timeout_s=120)


def test_an_idle_engine_gives_memory_back_once_and_keeps_prefixes_and_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "TRIM_AFTER_S", 0.05)
    listener = Listener()
    thread, backend = start(listener)
    adapters = [fake_adapter("a", 8), fake_adapter("b", 16), None]
    for turn in range(3):
        for name, adapter in zip("abc", adapters, strict=True):
            request = fake_request(f"{name}{turn}", range(3, 40), adapter, sampling=endless(30))
            thread.submit(request, adapter)
            listener.wait(partial(listener.ended, request.request_id))
            tokens = [token for chunk in listener.chunks[request.request_id] for token in chunk.token_ids]
            assert tokens == [line.token_id for line in fake_tokens(request, adapter)]
        deadline = time.monotonic() + 60
        while backend.num_forwards not in backend.trims and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        assert backend.trims.count(backend.num_forwards) == 1
    stats = thread.stats()
    assert stats.num_cached_tokens == 2 * 3 * 32, "the prefixes of the later turns"
    assert stats.num_adapter_writes == 2
    assert thread.stop(timeout_s=120)


def test_an_engine_that_is_idle_for_long_forgets_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "TRIM_AFTER_S", 0.02)
    monkeypatch.setattr(engine_thread, "FORGET_AFTER_S", 0.04)
    listener = Listener()
    thread, backend = start(listener)
    for name in ("r", "s"):
        before = len(backend.trims)
        request = fake_request(name, range(3, 40))
        thread.submit(request)
        listener.wait(partial(listener.ended, name))
        tokens = [token for chunk in listener.chunks[name] for token in chunk.token_ids]
        assert tokens == [line.token_id for line in fake_tokens(request, None)]
        deadline = time.monotonic() + 60
        while thread.stats().num_blocks_cached and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(backend.trims) > before
    assert thread.stats().num_cached_tokens == 0
    assert thread.stop(timeout_s=120)


def test_abort_and_stop_end_every_stream() -> None:
    listener, backend = Listener(), StuckBackend()
    thread = EngineThread(Engine(backend, EngineConfig()), listener.on_chunks, listener.failures.append)
    thread.start()
    for name in ("aborted", "running"):
        thread.submit(fake_request(name, [1, 2], sampling=endless()))
    assert backend.stuck.wait(timeout=120)
    thread.abort("aborted")
    backend.resumed.set()
    listener.wait(lambda: listener.ended("aborted"))
    assert listener.chunks["aborted"][-1].finish_reason == "abort"
    thread.stop(timeout_s=120)
    last = listener.chunks["running"][-1]
    assert last.finish_reason in ("error", "length")
    with pytest.raises(EngineFailure):
        thread.submit(fake_request("late", [1]))


def test_a_failure_is_reported_once_and_ends_the_streams() -> None:
    listener = Listener()
    thread, _ = start(listener, fail_at=2)
    thread.submit(fake_request("r", [1, 2], sampling=endless()))
    listener.wait(lambda: listener.ended("r"))
    assert isinstance(listener.chunks["r"][-1].error, EngineFailure)
    assert thread.stop(timeout_s=120)
    assert [str(failure) for failure in listener.failures] == [str(thread.failure)]
    assert "on fire" in str(thread.failure)


def test_a_raising_callback_is_a_failure_not_a_silent_death() -> None:
    listener = Listener()
    backend = FakeBackend(BackendLimits(64, 8, 64, 8, 8))
    reported = threading.Event()

    def raise_it(chunks: list[TokenChunk]) -> None:
        raise ValueError(f"cannot take {len(chunks)} chunks")

    def report(failure: EngineFailure) -> None:
        listener.failures.append(failure)
        reported.set()

    thread = EngineThread(Engine(backend, EngineConfig()), raise_it, report)
    thread.start()
    thread.submit(fake_request("r", [1]))
    assert reported.wait(timeout=120)
    assert "cannot take 1 chunks" in str(thread.failure)
    assert thread.stop(timeout_s=120)


def test_orders_after_the_stop_are_answered() -> None:
    adapter = fake_adapter("a", 8)
    listener = Listener()
    thread, _ = start(listener)
    assert thread.stop(timeout_s=120)
    with pytest.raises(EngineFailure, match="was stopped"):
        thread.unload_adapter(adapter.card.digest).result(timeout=120)
    with pytest.raises(EngineFailure, match="was stopped"):
        thread.load_adapter(adapter, AdapterRef("a", adapter.card.digest, "t"))


def test_a_thread_that_never_ran_leaves_nothing_unanswered() -> None:
    adapter = fake_adapter("a", 8)
    listener = Listener()
    backend = FakeBackend(BackendLimits(64, 8, 64, 8, 8))
    thread = EngineThread(Engine(backend, EngineConfig()), listener.on_chunks, listener.failures.append)
    thread.submit(fake_request("r", [1]))
    orders = [thread.unload_adapter("any"), thread.load_adapter(adapter, AdapterRef("a", adapter.card.digest, "t"))]
    assert thread.stop()
    assert isinstance(listener.chunks["r"][-1].error, EngineFailure)
    for order in orders:
        with pytest.raises(EngineFailure, match="was stopped"):
            order.result(timeout=0)


class StuckBackend(FakeBackend):
    """Its second step does not return before the test lets it."""

    def __init__(self) -> None:
        super().__init__(BackendLimits(64, 8, 64, 8, 8))
        self.stuck, self.resumed = threading.Event(), threading.Event()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if self.num_forwards == 1:
            self.stuck.set()
            assert self.resumed.wait(timeout=120)
        return super().forward(batch)


def test_a_step_that_hangs_is_the_engines_failure() -> None:
    listener, backend, now_s = Listener(), StuckBackend(), 0.0
    thread = EngineThread(Engine(backend, EngineConfig()), listener.on_chunks, listener.failures.append, lambda: now_s)
    thread.start()
    try:
        thread.submit(fake_request("r", [1, 2], sampling=endless()))
        assert backend.stuck.wait(timeout=120)
        found = []
        for _ in range(34):
            found.append(thread.check_progress(30.0))
            now_s += 1.0
        assert found == [False] * 31 + [True, False, False], "it is found after 30 s, and once"
        failure = thread.failure
        assert failure is not None
        assert failure.computing == {"r"}
        with pytest.raises(EngineFailure, match="hangs"):
            thread.submit(fake_request("late", [1]))
    finally:
        backend.resumed.set()
    listener.wait(lambda: listener.ended("r"))  # the step has come back, and nothing goes on behind its owner's back
    assert listener.chunks["r"][-1].error is failure
    assert thread.stop(timeout_s=120)
    assert listener.failures == [failure]


def test_a_step_that_takes_long_where_steps_do_does_not_hang() -> None:
    listener, backend, now_s = Listener(), StuckBackend(), 0.0

    def clock() -> float:
        nonlocal now_s
        if threading.current_thread() is not threading.main_thread():
            now_s += 2.0  # the beginning and the end of a step, on the engine's thread
        return now_s

    thread = EngineThread(Engine(backend, EngineConfig()), listener.on_chunks, listener.failures.append, clock)
    thread.start()
    try:
        thread.submit(fake_request("r", [1, 2], sampling=endless(3)))
        assert backend.stuck.wait(timeout=120)
        for _ in range(90):  # 45 times as long as usual
            assert not thread.check_progress(30.0)
            now_s += 1.0
    finally:
        backend.resumed.set()
    listener.wait(lambda: listener.ended("r"))
    assert thread.stop(timeout_s=120)
    assert listener.failures == []
