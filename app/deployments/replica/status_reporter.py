"""What a replica says about itself: to placement where adapters are, to the registry what came, left and was used.

In: the engine's counts and what its service knows of requests. Out: one loop of reports. Placement hears at once when
adapters have moved, and of the load at intervals; the registry hears at most once a second, and only news. Rule: a
registry that is slow, away or broken delays nothing else, and hears later what it has missed. Where several tenants
wait, placement is asked what they were served elsewhere; nobody waits for its answer. When the engine has failed, or
Serve ends this replica, placement is told that it takes nothing more: its adapters must find other homes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.service import PlacementService
from app.deployments.replica.engine_service import EngineService
from app.deployments.rpc.background_tasks import LogOnce, Tasks
from app.deployments.rpc.wait_for_event import wait_for_event
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.interface import RunningEngine
from app.engine.stats import EngineStats, TenantService

#: Reports are at least this far apart, however fast adapters move.
MIN_REPORT_INTERVAL_S = 0.1
#: How often the registry hears of use: a hot set that is this old after a crash is as good.
OBSERVE_INTERVAL_S = 1.0
#: Placement that has not taken a report by then is told the next one instead.
REPORT_TIMEOUT_S = 5.0
#: So many of the tenants that wait are asked about, those that began to wait first.
MAX_TENANTS = 64
#: So many adapters' use is remembered for a registry that is away, the last that were used.
MAX_UNTOLD = 4096


class StatsMetrics(Protocol):
    """What is exported from the engine's counts (`EngineMetrics`, `DeviceMetrics`)."""

    def update(self, stats: EngineStats) -> None: ...


class StatusReporter:
    """One per replica, on its event loop. `clock` gives seconds and never goes back.

    `is_draining` says whether Serve ends this replica. `reports_prefixes`: placement is told what the engine has cached of
    what prompts begin with (`placement.prefix_affinity`).
    """

    def __init__(
        self,
        replica_id: str,
        engine: RunningEngine,
        service: EngineService,
        placement: PlacementService,
        store: StoreService[SharedAdapter],
        metrics: Sequence[StatsMetrics],
        *,
        telling: DeltaReporter,
        is_draining: Callable[[], bool],
        interval_s: float,
        clock: Callable[[], float],
        reports_prefixes: bool = False,
    ) -> None:
        self._reports_prefixes = reports_prefixes
        self._replica_id = replica_id
        self._engine = engine
        self._service = service
        self._placement = placement
        self._store = store
        self._metrics = metrics
        self._telling = telling
        self._is_draining = is_draining
        self._interval_s = interval_s
        self._clock = clock
        self._observed_s = clock()
        self._known_resident: set[str] = set()  # as the registry knows it
        self._untold_s: dict[str, float] = {}  # adapters in use, and when, that the registry has not heard of
        self._observing = Tasks()
        self._hearing = Tasks()
        self._is_listening = False  # whether what is served elsewhere was heard all the time since several wait
        self._placement_troubles = LogOnce("reporting to placement")
        self._registry_troubles = LogOnce("telling the registry of use")
        self._hearing_troubles = LogOnce("asking placement what tenants are served elsewhere")

    async def run(self) -> None:
        """Report until the engine has failed, or the task is cancelled."""
        is_due, reported_s, was_draining = True, self._clock(), False
        while self._engine.failure is None:
            stats, now_s, is_draining = self._engine.stats(), self._clock(), self._is_draining()
            is_due = is_due and self._telling.has_changed(_resident(stats))
            if is_due or is_draining != was_draining or now_s - reported_s >= self._interval_s:
                reported_s, was_draining = now_s, is_draining
                service = self._engine.service()
                await self._report(stats, service, is_draining=is_draining)
                self._ask_elsewhere(service)
            if now_s - self._observed_s >= OBSERVE_INTERVAL_S and not self._observing:
                self._observed_s = now_s
                for metrics in self._metrics:
                    metrics.update(stats)
                self._observing.start(self._observe({item.digest for item in stats.residents}))
            is_due = await self._has_changed(min(self._interval_s, OBSERVE_INTERVAL_S))
        await self._report(self._engine.stats(), self._engine.service(), is_draining=True)

    def close(self) -> None:
        """Tell the registry nothing more."""
        self._observing.cancel()
        self._hearing.cancel()

    async def _has_changed(self, timeout_s: float) -> bool:
        """Whether adapters may have moved; waits for it, at most this long."""
        if not await wait_for_event(self._service.changed, timeout_s):
            return False
        await asyncio.sleep(MIN_REPORT_INTERVAL_S)
        self._service.changed.clear()
        return True

    async def _report(self, stats: EngineStats, service: TenantService, *, is_draining: bool) -> None:
        state = self._service.report(self._replica_id, stats.num_running, stats.num_waiting, _resident(stats))
        num_rows = {item.digest: item.num_rows for item in stats.residents}
        state = replace(
            state, num_rows=num_rows, num_rank_rows=stats.num_rank_rows, num_kv_tokens=stats.num_kv_tokens,
            cached_prefixes=stats.cached_prefixes if self._reports_prefixes else (), served=service.served,
        )  # fmt: skip
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                if not await self._placement.report(self._telling.next_delta(state, is_draining=is_draining)):
                    self._telling.reset()
                    await self._placement.report(self._telling.next_delta(state, is_draining=is_draining))
        except Exception as error:  # nothing that placement does may end a replica
            self._telling.reset()  # who knows what it has heard: the next report is a whole one
            self._placement_troubles.met(error)
        else:
            self._placement_troubles.over()

    def _ask_elsewhere(self, service: TenantService) -> None:
        """If it matters here what tenants were served elsewhere, ask; nobody waits for the answer."""
        waiting = service.waiting
        if len(waiting) < 2:
            self._is_listening = False
        elif not self._hearing:
            self._hearing.start(self._hear_elsewhere(waiting[:MAX_TENANTS]))

    async def _hear_elsewhere(self, tenant_ids: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                served = await self._placement.served_elsewhere(self._replica_id, tenant_ids)
        except Exception as error:  # nothing that placement does may end a replica: without it each is fair by itself
            self._hearing_troubles.met(error)
            self._is_listening = False
            return
        self._hearing_troubles.over()
        self._engine.hear_elsewhere(served, continues=self._is_listening)
        self._is_listening = True

    async def _observe(self, resident: set[str]) -> None:
        """Tell what came to and left the device since the last time that was heard, and what requests used."""
        self._untold_s |= self._service.take_used()
        if len(self._untold_s) > MAX_UNTOLD:
            newest = sorted(self._untold_s, key=self._untold_s.__getitem__)[-MAX_UNTOLD:]
            self._untold_s = {digest: self._untold_s[digest] for digest in newest}
        if resident == self._known_resident and not self._untold_s:
            return
        loaded, unloaded = sorted(resident - self._known_resident), sorted(self._known_resident - resident)
        try:
            await self._store.observe(self._replica_id, loaded, unloaded, self._untold_s)
        except Exception as error:  # nothing that the registry does may end a replica; it is told later
            self._registry_troubles.met(error)
        else:
            self._registry_troubles.over()
            self._known_resident, self._untold_s = resident, {}


def _resident(stats: EngineStats) -> tuple[str, ...]:
    return tuple(sorted(item.digest for item in stats.residents))
