"""What a replica needs of an engine.

All methods may be called from any thread; chunks go to the callback given at creation. Every submitted request gets a
last chunk and every adapter command an answer, also when the engine fails or is stopped, unless a step hangs
(`check_progress`). `app.engine.factory.create_engine` builds one from a checkpoint; the implementation is
`app.engine.engine_thread.EngineThread`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Protocol

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.errors import EngineFailure
from app.engine.request import GenerateRequest, TokenChunk
from app.engine.stats import EngineStats, TenantService

#: Takes the chunks of one step, in order, on the engine's thread. It must be quick and must not raise.
OnChunks = Callable[[list[TokenChunk]], None]
#: Takes the reason of the engine's failure, once. It must be quick and must not raise.
OnFailure = Callable[[EngineFailure], None]


class RunningEngine(Protocol):
    """One base model, its adapters and its requests. It computes by itself between `start` and `stop`."""

    @property
    def failure(self) -> EngineFailure | None:
        """Why the engine stopped computing, or None while it works. Health checks read this."""
        ...

    def warm_up(self) -> None:
        """Compile, allocate and touch everything before the first request. Call it before `start`.

        Nothing stays cached or resident. Raises EngineFailure if a warm-up request fails.
        """
        ...

    def start(self) -> None:
        """Start computing."""
        ...

    def stop(self, timeout_s: float | None = None) -> bool:
        """End all requests with an EngineFailure and release the memory once the current step has ended.

        Returns whether that happened within `timeout_s`; None waits for as long as it takes.
        """
        ...

    def check_progress(self, max_step_s: float) -> bool:
        """Detect a step that hangs; to be called every second, one call at a time. It may take seconds.

        A step that has run for over `max_step_s`, and many times longer than usual, fails the engine. Returns whether
        this call found that. Nothing is computed and no request is answered any more: the caller moves the requests to
        another replica, and the process has to end.
        """
        ...

    def submit(self, request: GenerateRequest, adapter: LoraAdapter | None = None) -> None:
        """Queue a request; its chunks go to the callback. `adapter` holds the weights of `request.adapter`.

        Raises InvalidRequest (ContextOverflow), AdapterTooLarge, AdapterMismatch, QueueFull or EngineFailure; then
        nothing was queued.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request soon, with finish_reason "abort". Unknown and finished requests are ignored."""
        ...

    def pin_adapters(self, digests: Collection[str]) -> None:
        """Pin exactly these adapters: once resident they are never evicted, idle or not.

        Requests for adapters that then have no room end with AdapterPoolFull.
        """
        ...

    def load_adapter(self, adapter: LoraAdapter, ref: AdapterRef) -> Future[int]:
        """Make an adapter resident before any request needs it, on behalf of `ref`'s tenant.

        The result is the number of bytes written: 0 if it was resident, or if another load command wrote it.

        Raises AdapterTooLarge, AdapterMismatch or EngineFailure; the future may raise AdapterPoolFull, EngineFailure,
        or the AdapterError of the write.
        """
        ...

    def unload_adapter(self, digest: str) -> Future[int]:
        """Free an adapter's rows once its last request has ended; the result is the number of rows freed.

        If the adapter is loaded again before that, it stays and the result is 0. The future may raise EngineFailure.
        """
        ...

    def stats(self) -> EngineStats:
        """A snapshot of what the engine holds and has done, at about this moment."""
        ...

    def service(self) -> TenantService:
        """Service per tenant on this engine and the tenants that wait, at about this moment."""
        ...

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        """Tell the fair queue what other replicas have served to tenants that wait here, as totals per tenant.

        `continues`: no report was missed since the last call. Otherwise these totals are only the new starting point.
        """
        ...
