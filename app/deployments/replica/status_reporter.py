"""Reports of a replica: adapters and load to placement, adapters and their use to the registry.

Placement gets a report at once when adapters have moved, and the load at intervals; the registry gets changes at most
once a second. A registry that is slow or down delays nothing else, and gets later what it missed. While several tenants
wait, placement is asked in the background what they were served elsewhere. When the engine has failed, or Serve stops
this replica, placement learns that it accepts nothing more, so its adapters need other replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.service import PlacementService
from app.deployments.replica.engine_service import EngineService
from app.deployments.rpc.background_tasks import LogOnce, Tasks, wait_for_event
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.engine_thread import EngineThread
from app.engine.stats import EngineStats, TenantService

#: Shortest time between reports.
MIN_REPORT_INTERVAL_S = 0.1
#: How often the registry gets adapters' use. After a crash the hot set may be this old.
OBSERVE_INTERVAL_S = 1.0
#: A report to placement is abandoned after this long; the next one replaces it.
REPORT_TIMEOUT_S = 5.0
#: Waiting tenants in a query to placement, those that have waited longest.
MAX_TENANTS = 64
#: Adapters whose use is remembered while the registry is down, the most recently used.
MAX_UNREPORTED = 4096


class StatsMetrics(Protocol):
    """Metrics exported from the engine's counts (`EngineMetrics`, `DeviceMetrics`)."""

    def update(self, stats: EngineStats) -> None: ...


class StatusReporter:
    """One per replica, on its event loop. `clock` gives seconds that never go back.

    `is_draining`: whether Serve is stopping this replica. `reports_prefixes`: reports contain the keys of cached prompt
    prefixes (`placement.prefix_affinity`).
    """

    def __init__(
        self,
        replica_id: str,
        engine: EngineThread,
        service: EngineService,
        placement: PlacementService,
        store: StoreService[SharedAdapter],
        metrics: Sequence[StatsMetrics],
        *,
        delta_reporter: DeltaReporter,
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
        self._delta_reporter = delta_reporter
        self._is_draining = is_draining
        self._interval_s = interval_s
        self._clock = clock
        self._registry_report_s = clock()
        self._known_resident: set[str] = set()  # as the registry knows it
        self._unreported_s: dict[str, float] = {}  # digest -> last use, not reported to the registry yet
        self._registry_report = Tasks()
        self._service_query = Tasks()
        self._has_service_history = False  # whether every query succeeded since several tenants wait
        self._placement_errors = LogOnce("reporting to placement")
        self._registry_errors = LogOnce("reporting adapters' use to the registry")
        self._service_errors = LogOnce("asking placement what tenants are served elsewhere")

    async def run(self) -> None:
        """Report until the engine has failed, or the task is cancelled."""
        is_due, reported_s, was_draining = True, self._clock(), False
        while self._engine.failure is None:
            stats, now_s, is_draining = self._engine.stats(), self._clock(), self._is_draining()
            is_due = is_due and self._delta_reporter.has_changed(_resident(stats))
            if is_due or is_draining != was_draining or now_s - reported_s >= self._interval_s:
                reported_s, was_draining = now_s, is_draining
                service = self._engine.service()
                await self._report(stats, service, is_draining=is_draining)
                self._query_remote_service(service)
            if now_s - self._registry_report_s >= OBSERVE_INTERVAL_S and not self._registry_report:
                self._registry_report_s = now_s
                for metrics in self._metrics:
                    metrics.update(stats)
                self._registry_report.start(self._report_to_registry({item.digest for item in stats.residents}))
            is_due = await self._has_changed(min(self._interval_s, OBSERVE_INTERVAL_S))
        await self._report(self._engine.stats(), self._engine.service(), is_draining=True)

    def close(self) -> None:
        """Stop reports to the registry."""
        self._registry_report.cancel()
        self._service_query.cancel()

    async def _has_changed(self, timeout_s: float) -> bool:
        """Whether adapters may have moved; waits for it for at most `timeout_s`."""
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
                if not await self._placement.report(self._delta_reporter.next_delta(state, is_draining=is_draining)):
                    self._delta_reporter.reset()
                    await self._placement.report(self._delta_reporter.next_delta(state, is_draining=is_draining))
        except Exception as error:  # no failure of placement may end a replica
            self._delta_reporter.reset()  # placement's state is unknown: the next report is complete
            self._placement_errors.on_error(error)
        else:
            self._placement_errors.on_recovery()

    def _query_remote_service(self, service: TenantService) -> None:
        """If several tenants wait here, query in the background what they were served elsewhere."""
        waiting = service.waiting
        if len(waiting) < 2:
            self._has_service_history = False
        elif not self._service_query:
            self._service_query.start(self._fetch_remote_service(waiting[:MAX_TENANTS]))

    async def _fetch_remote_service(self, tenant_ids: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                served = await self._placement.served_elsewhere(self._replica_id, tenant_ids)
        except Exception as error:  # without placement each replica is fair by itself
            self._service_errors.on_error(error)
            self._has_service_history = False
            return
        self._service_errors.on_recovery()
        self._engine.add_remote_service(served, continues=self._has_service_history)
        self._has_service_history = True

    async def _report_to_registry(self, resident: set[str]) -> None:
        """Report adapters that joined or left the device since the last successful report, and those that requests
        used."""
        self._unreported_s |= self._service.drain_usage()
        if len(self._unreported_s) > MAX_UNREPORTED:
            newest = sorted(self._unreported_s, key=self._unreported_s.__getitem__)[-MAX_UNREPORTED:]
            self._unreported_s = {digest: self._unreported_s[digest] for digest in newest}
        if resident == self._known_resident and not self._unreported_s:
            return
        loaded, unloaded = sorted(resident - self._known_resident), sorted(self._known_resident - resident)
        try:
            await self._store.observe(self._replica_id, loaded, unloaded, self._unreported_s)
        except Exception as error:  # no failure of the registry may end a replica; the next report includes this one
            self._registry_errors.on_error(error)
        else:
            self._registry_errors.on_recovery()
            self._known_resident, self._unreported_s = resident, {}


def _resident(stats: EngineStats) -> tuple[str, ...]:
    return tuple(sorted(item.digest for item in stats.residents))
