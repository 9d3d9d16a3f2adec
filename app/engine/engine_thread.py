"""The thread that owns a device: it steps an engine while there is work, and otherwise gives memory back and sleeps.

Each step's chunks go to `on_chunks`, called on this thread; a failure goes to `on_failure`, once. Every submitted
request gets a last chunk and every adapter command an answer, also when the engine fails or the thread is stopped. The
exception is a step that hangs: a thread cannot be ended, so `check_progress` reports a failure and the process has to
be replaced. A replica has an `EngineThread`, made by `app.engine.factory.create_engine`, and calls it from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from statistics import median

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.engine import Engine
from app.engine.errors import EngineFailure
from app.engine.request import GenerateRequest, TokenChunk
from app.engine.stats import EngineStats, TenantService
from app.engine.warm_up import warm_up

#: Takes the chunks of one step, in order, on the engine's thread. It must be quick and must not raise.
OnChunks = Callable[[list[TokenChunk]], None]
#: Takes the reason of the engine's failure, once. It must be quick and must not raise.
OnFailure = Callable[[EngineFailure], None]
#: A step may hang if it takes this many times as long as the median step.
HUNG_FACTOR = 50
#: Steps in the median.
NUM_STEPS = 64
#: The age of a step is sampled once a second. A longer gap than this is time in which this process did not run.
LONGEST_GAP_S = 2.0
#: An engine without work for so long gives memory back; short pauses between bursts should not cost page faults.
TRIM_AFTER_S = 30.0
#: After this time its cached prefixes go, too; the next requests with them compute them again.
FORGET_AFTER_S = 600.0


class EngineThread:
    """One base model, its adapters and its requests. It computes by itself between `start` and `stop`."""

    def __init__(
        self,
        engine: Engine,
        on_chunks: OnChunks,
        on_failure: OnFailure | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._on_chunks = on_chunks
        self._on_failure = on_failure
        self._wake = threading.Event()
        engine.on_work = self._wake.set
        self._stopping = False
        self._is_closed = False
        self._failure: EngineFailure | None = None
        self._failure_lock = threading.Lock()
        self._steps = StepWatchdog(clock)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def warm_up(self) -> None:
        """Compile, allocate and touch everything before the first request, on the caller's thread and before `start`.

        Nothing stays cached or resident. Raises EngineFailure if a warm-up request fails.
        """
        assert self._thread.ident is None, "warm up before you start"
        warm_up(self._engine)

    def start(self) -> None:
        """Start computing."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End all requests with an EngineFailure, stop the thread after its current step and close the engine.

        Returns whether the thread has ended, within `timeout_s` if that is given. Until it has, the memory it may write
        to is not released. To drain, the caller stops submitting and waits for the last chunks before it calls this.
        """
        self._stopping = True
        self._wake.set()
        if self._thread.ident is None:
            self._shut_down()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        has_ended = not self._thread.is_alive()
        if has_ended and not self._is_closed:
            self._is_closed = True
            self._engine.close()
        return has_ended

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine stopped computing, or None while it works. Health checks read this."""
        return self._failure or self._engine.failure

    def check_progress(self, max_step_s: float) -> bool:
        """Detect a step that hangs; to be called every second, one call at a time. It may take seconds.

        A step that has run for over `max_step_s`, and many times longer than usual, fails the engine. Returns whether
        this call found that. Nothing is computed and no request is answered any more: the caller moves the requests to
        another replica, and the process has to end.
        """
        age_s, usual_s = self._steps.age_s(), self._steps.usual_s
        if age_s <= max(max_step_s, HUNG_FACTOR * usual_s):
            return False
        reason = f"a step has run for {age_s:.0f} s; the median step takes {usual_s:.3g} s: it hangs"
        return self._fail(EngineFailure(reason, computing=self._engine.computing))

    def submit(self, request: GenerateRequest, adapter: LoraAdapter | None = None) -> None:
        """Queue a request; its chunks go to the callback. `adapter` holds the weights of `request.adapter`.

        Raises InvalidRequest (ContextOverflow), AdapterTooLarge, AdapterMismatch, QueueFull or EngineFailure; then
        nothing was queued.
        """
        if self.failure is not None:
            raise self.failure
        self._engine.submit(request, adapter)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """End a request soon, with finish_reason "abort". Unknown and finished requests are ignored."""
        self._engine.abort(request_id)
        self._wake.set()

    def unload_adapter(self, digest: str) -> Future[int]:
        """Free an adapter's rows once its last request has ended; the result is the number of rows freed.

        If the adapter is loaded again before that, it stays and the result is 0. The future may raise EngineFailure.
        """
        freed = self._engine.unload_adapter(digest)
        self._wake.set()
        return freed

    def pin_adapters(self, digests: Collection[str]) -> None:
        """Pin exactly these adapters: once resident they stay, idle or not (`AdapterPool` may move idle ones).

        Requests for adapters that then have no room end with AdapterPoolFull.
        """
        self._engine.pin_adapters(digests)
        self._wake.set()

    def load_adapter(self, adapter: LoraAdapter, ref: AdapterRef) -> Future[int]:
        """Make an adapter resident before any request needs it, on behalf of `ref`'s tenant.

        The result is the number of bytes written: 0 if it was resident, or if another load command wrote it.

        Raises AdapterTooLarge, AdapterMismatch or EngineFailure; the future may raise AdapterPoolFull, EngineFailure,
        or the AdapterError of the write.
        """
        if self.failure is not None:
            raise self.failure
        resident = self._engine.load_adapter(adapter, ref)
        self._wake.set()
        return resident

    def stats(self) -> EngineStats:
        """A snapshot of what the engine holds and has done, at about this moment."""
        return self._engine.stats()

    def service(self) -> TenantService:
        """Service per tenant on this engine and the tenants that wait, at about this moment."""
        return self._engine.service()

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        """Tell the fair queue what other replicas have served to tenants that wait here, as totals per tenant.

        `continues`: no report was missed since the last call. Otherwise these totals are only the new starting point.
        """
        self._engine.add_remote_service(served, continues=continues)
        self._wake.set()

    def _run(self) -> None:
        engine = self._engine
        try:
            while not self._stopping:
                if not engine.has_work:
                    self._sleep()
                    continue
                self._steps.begin()
                chunks = engine.step()
                self._steps.end()
                if self._failure is not None and engine.failure is None:  # the hung step returned, too late
                    chunks += engine.shut_down(self._failure)
                if chunks:
                    self._on_chunks(chunks)
                if engine.failure is not None:
                    self._fail(engine.failure)
            self._shut_down()
        except Exception as error:  # a callback raised: report the failure, but use no callback for chunks again
            failure = EngineFailure(f"the engine's thread ended: {type(error).__name__}: {error}")
            failure.__cause__ = error
            engine.shut_down(failure)
            self._fail(failure)

    def _sleep(self) -> None:
        """Wait for work, and give memory back meanwhile."""
        for idle_s, keeps_prefixes in ((TRIM_AFTER_S, True), (FORGET_AFTER_S - TRIM_AFTER_S, False)):
            if self._wake.wait(idle_s):
                break
            if not self._engine.trim_memory(self._wake.is_set, keeps_prefixes=keeps_prefixes):
                break
        self._wake.wait()
        self._wake.clear()

    def _shut_down(self) -> None:
        chunks = self._engine.shut_down(EngineFailure("the engine was stopped"))
        if chunks:
            self._on_chunks(chunks)

    def _fail(self, failure: EngineFailure) -> bool:
        """Record and report a failure. False if there was one before."""
        with self._failure_lock:
            if self._failure is not None:
                return False
            self._failure = failure
        if self._on_failure is not None:
            self._on_failure(failure)
        return True


class StepWatchdog:
    """Measures how long the current step has run and how long steps usually take. `clock` is monotonic, in seconds.

    The age counts only time between two samples that saw the same step, so a process that was stopped, or a machine
    that slept, does not look like a hanging step. `begin` and `end` are called by the thread that steps; `age_s` and
    `usual_s` by another, one call at a time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_steps = 0
        self._current: int | None = None
        self._started_s = 0.0
        self._durations_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._sampled: int | None = None
        self._sampled_s = 0.0
        self._age_s = 0.0

    def begin(self) -> None:
        self._num_steps += 1
        self._started_s = self._clock()
        self._current = self._num_steps

    def end(self) -> None:
        self._current = None
        self._durations_s.append(self._clock() - self._started_s)

    @property
    def usual_s(self) -> float:
        """The median duration of recent steps; 0 before the first has ended."""
        return median(list(self._durations_s)) if self._durations_s else 0.0

    def age_s(self) -> float:
        """How long the current step has been observed; 0 at its first sample or without a step."""
        now_s, current = self._clock(), self._current
        if current is None or current != self._sampled:
            self._age_s = 0.0
        else:
            self._age_s += min(now_s - self._sampled_s, LONGEST_GAP_S)
        self._sampled, self._sampled_s = current, now_s
        return self._age_s
