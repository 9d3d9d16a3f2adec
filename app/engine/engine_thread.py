"""The one thread that owns a device: it steps an engine while there is work and sleeps otherwise.

In: the engine's submits, aborts and adapter orders, from any thread. Out: each step's chunks, in one call of
`on_chunks` made from this thread, and at most one call of `on_failure`. Rule: every submitted request gets
a last chunk and every adapter order an answer, also when the engine fails or the thread is stopped. Only a step that
hangs answers nobody: nothing can end it, so it is told as a failure, and the process has to be replaced.
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
from app.engine.interface import OnChunks, OnFailure
from app.engine.request import GenerateRequest
from app.engine.stats import EngineStats, TenantService
from app.engine.warm_up import warm_up

#: A step that takes this many times as long as usual may have hung.
HUNG_FACTOR = 50
#: So many steps say what is usual.
NUM_STEPS = 64
#: More time than this between two looks is time in which this process did not run; looks are a second apart.
LONGEST_GAP_S = 2.0


class EngineThread:
    """Runs one engine: `app.engine.interface.RunningEngine` says what each method promises."""

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
        """Step the engine in the caller's thread, which `start` hands over to its own."""
        assert self._thread.ident is None, "warm up before you start"
        warm_up(self._engine)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End all requests with an EngineFailure, the thread after its current step, and then close the engine.

        Returns whether the thread has ended; as long as it has not, the memory it may write to is not released.
        Draining is the caller's: stop submitting, wait for the last chunks, then stop.
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
        """The engine's failure, or that of this thread."""
        return self._failure or self._engine.failure

    def check_progress(self, max_step_s: float) -> bool:
        """Declare the engine failed if its present step hangs; whether that is so, and was not known before."""
        age_s, usual_s = self._steps.age_s(), self._steps.usual_s
        if age_s <= max(max_step_s, HUNG_FACTOR * usual_s):
            return False
        reason = f"a step has lasted for {age_s:.0f} s, and usually one lasts for {usual_s:.3g} s: it hangs"
        return self._fail(EngineFailure(reason, computing=self._engine.computing))

    def submit(self, request: GenerateRequest, adapter: LoraAdapter | None = None) -> None:
        """As `Engine.submit`, and wakes the thread."""
        if self.failure is not None:
            raise self.failure
        self._engine.submit(request, adapter)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._wake.set()

    def unload_adapter(self, digest: str) -> Future[int]:
        freed = self._engine.unload_adapter(digest)
        self._wake.set()
        return freed

    def pin_adapters(self, digests: Collection[str]) -> None:
        self._engine.pin_adapters(digests)
        self._wake.set()

    def load_adapter(self, adapter: LoraAdapter, ref: AdapterRef) -> Future[int]:
        if self.failure is not None:
            raise self.failure
        resident = self._engine.load_adapter(adapter, ref)
        self._wake.set()
        return resident

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def service(self) -> TenantService:
        return self._engine.service()

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        self._engine.add_remote_service(served, continues=continues)
        self._wake.set()

    def _run(self) -> None:
        engine = self._engine
        try:
            while not self._stopping:
                if not engine.has_work:
                    self._wake.wait()
                    self._wake.clear()
                    continue
                self._steps.begin()
                chunks = engine.step()
                self._steps.end()
                if self._failure is not None and engine.failure is None:  # the step came back after all: too late
                    chunks += engine.shut_down(self._failure)
                if chunks:
                    self._on_chunks(chunks)
                if engine.failure is not None:
                    self._fail(engine.failure)
            self._shut_down()
        except Exception as error:  # a callback broke its promise: report it, answer nobody through it again
            failure = EngineFailure(f"the engine's thread ended: {type(error).__name__}: {error}")
            failure.__cause__ = error
            engine.shut_down(failure)
            self._fail(failure)

    def _shut_down(self) -> None:
        chunks = self._engine.shut_down(EngineFailure("the engine was stopped"))
        if chunks:
            self._on_chunks(chunks)

    def _fail(self, failure: EngineFailure) -> bool:
        """Whether this is the first failure."""
        with self._failure_lock:
            if self._failure is not None:
                return False
            self._failure = failure
        if self._on_failure is not None:
            self._on_failure(failure)
        return True


class StepWatchdog:
    """How long the present step has lasted, and how long steps usually last; `clock` gives seconds and never goes back.

    The age is the time between looks that saw the same step, so a process that was stopped, or whose machine slept,
    does not look like a step that hangs.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_begun = 0
        self._present: int | None = None
        self._began_s = 0.0
        self._lasted_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._seen: int | None = None
        self._looked_s = 0.0
        self._age_s = 0.0

    # -- the thread that steps ------------------------------------------------------------------------

    def begin(self) -> None:
        self._num_begun += 1
        self._began_s = self._clock()
        self._present = self._num_begun

    def end(self) -> None:
        self._present = None
        self._lasted_s.append(self._clock() - self._began_s)

    # -- whoever looks, one thread --------------------------------------------------------------------

    @property
    def usual_s(self) -> float:
        """The median of the last steps; 0 before the first has ended."""
        return median(list(self._lasted_s)) if self._lasted_s else 0.0

    def age_s(self) -> float:
        """How long the present step has been seen; 0 at the first look at it, or when there is none."""
        now_s, present = self._clock(), self._present
        if present is None or present != self._seen:
            self._age_s = 0.0
        else:
            self._age_s += min(now_s - self._looked_s, LONGEST_GAP_S)
        self._seen, self._looked_s = present, now_s
        return self._age_s
