"""What a replica needs of an engine, whichever engine it is.

In: requests with their adapters' weights, aborts and orders about adapters, from any thread. Out: lists of chunks
through the callback that the engine was opened with. Rule: every submitted request gets a last chunk and every order
an answer, also when the engine fails or is stopped; unless a step hangs (`check_progress`).
`app.engine.factory.create_engine` makes one from a checkpoint; `app.engine.engine_thread.EngineThread` is this project's own.
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

#: Takes the chunks of one step, in order, on a thread of the engine. It must be quick and must not raise.
OnChunks = Callable[[list[TokenChunk]], None]
#: Takes the reason why an engine has failed, once, on a thread of the engine. It must be quick and must not raise.
OnFailure = Callable[[EngineFailure], None]


class RunningEngine(Protocol):
    """One base model, its adapters and its requests. It runs by itself between `start` and `stop`."""

    @property
    def failure(self) -> EngineFailure | None:
        """Why nothing is computed any more, or None while all is well. Health checks read this."""
        ...

    def warm_up(self) -> None:
        """Do everything once, so that no request waits for it: compile, allocate, touch. Call it before `start`.

        Nothing stays cached or resident. Raises EngineFailure if that does not work.
        """
        ...

    def start(self) -> None:
        """Begin to compute."""
        ...

    def stop(self, timeout_s: float | None = None) -> bool:
        """End all requests with an EngineFailure, and release the memory once the current step has ended.

        Returns whether that happened within `timeout_s`; None waits for as long as it takes.
        """
        ...

    def check_progress(self, max_step_s: float) -> bool:
        """Notice a step that hangs; to be called every second, always by the same thread.

        A step that has lasted over `max_step_s`, and many times longer than usual, is the engine's failure from then
        on. Returns whether this call found that out. Nothing computes any more, and what waits is not answered: its
        owner moves the requests, and the process has to end.
        """
        ...

    def submit(self, request: GenerateRequest, adapter: LoraAdapter | None = None) -> None:
        """Queue a request; its chunks go to the callback. `adapter` holds the weights `request.adapter` refers to.

        Raises InvalidRequest (ContextOverflow), AdapterTooLarge, AdapterMismatch, QueueFull or EngineFailure;
        then nothing was queued.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request soon, with finish_reason "abort". A request that has just ended is left alone."""
        ...

    def pin_adapters(self, digests: Collection[str]) -> None:
        """Never evict these adapters, and no others, once they are resident, idle or not.

        Requests for adapters that they leave no room for end with NotReady.
        """
        ...

    def load_adapter(self, adapter: LoraAdapter, ref: AdapterRef) -> Future[int]:
        """Make an adapter resident before any request asks for it, on behalf of `ref`'s tenant.

        The result is how many bytes were written for it: 0 if it was resident already, or is for another such order.

        Raises AdapterTooLarge, AdapterMismatch or EngineFailure; the future may raise NotReady (pinned adapters leave
        no room), EngineFailure, or the AdapterError that writing it met.
        """
        ...

    def unload_adapter(self, digest: str) -> Future[int]:
        """Free an adapter's rows once its last request has ended; the result is how many rows were freed.

        An adapter that is brought again before that stays, and no rows are freed. The future may raise EngineFailure.
        """
        ...

    def stats(self) -> EngineStats:
        """What the engine holds and has done, as of about now."""
        ...

    def service(self) -> TenantService:
        """What tenants were served here, and which of them wait, as of about now."""
        ...

    def add_remote_service(self, served: Mapping[str, float], *, continues: bool) -> None:
        """Other replicas served tenants that wait here so much in all; it counts for whose turn is next.

        `continues`: nothing was missed since the last such call; otherwise the totals are where counting begins.
        """
        ...
