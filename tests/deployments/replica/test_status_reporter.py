"""One loop tells placement at once and the registry what is news; neither can hold up the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest
import pytest_asyncio

from app.deployments.ingress.dispatch.request_router import PrefixHasher
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaDelta
from app.deployments.replica import status_reporter as module
from app.deployments.replica.status_reporter import StatusReporter
from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.engine.adapters.adapter import LoraAdapter
from app.engine.errors import ConfigError, NotReady
from app.engine.stats import EngineStats, TenantService
from tests.deployments.fleet import LIMITS, FakeReplica, Fleet
from tests.deployments.placed import ORIGIN
from tests.fakes import FAKE_BASE, fake_adapter, fake_request


class Listeners:
    """Placement and the registry, which may be away or slow."""

    def __init__(self) -> None:
        self.reports: list[ReplicaDelta] = []
        self.resident: set[str] = set()  # as placement knows it
        self.wants_whole = False
        self.observed: list[tuple[list[str], list[str], dict[str, float]]] = []
        self.placement_error: Exception | None = None
        self.elsewhere: dict[str, float] = {}
        self.elsewhere_error: Exception | None = None
        self.asked: list[tuple[str, ...]] = []
        self.registry_error: Exception | None = None
        self.registry_answers = asyncio.Event()
        self.registry_answers.set()
        self.num_updates = 0

    async def report(self, news: ReplicaDelta) -> bool:
        if self.placement_error is not None:
            raise self.placement_error
        self.reports.append(news)
        if self.wants_whole and not news.is_whole:
            return False
        self.wants_whole = False
        self.resident = {*news.loaded} if news.is_whole else (self.resident - {*news.unloaded}) | {*news.loaded}
        return True

    async def served_elsewhere(self, replica_id: str, tenant_ids: Sequence[str]) -> Mapping[str, float]:
        assert replica_id == "replica-0"
        self.asked.append(tuple(tenant_ids))
        if self.elsewhere_error is not None:
            raise self.elsewhere_error
        return {tenant_id: self.elsewhere.get(tenant_id, 0.0) for tenant_id in tenant_ids}

    async def observe(
        self, replica_id: str, loaded: Sequence[str], unloaded: Sequence[str], used_s: Mapping[str, float]
    ) -> None:
        assert replica_id == "replica-0"
        await self.registry_answers.wait()
        if self.registry_error is not None:
            raise self.registry_error
        self.observed.append((list(loaded), list(unloaded), dict(used_s)))

    def update(self, _: EngineStats) -> None:
        self.num_updates += 1


class Bench:
    """A replica of a fleet, and its reports."""

    def __init__(self) -> None:
        self.fleet = Fleet(1)
        self.dispatcher = self.fleet.dispatcher()
        self.listeners = Listeners()
        self.running: asyncio.Task[None] | None = None
        self.is_draining = False

    @property
    def replica(self) -> FakeReplica:
        return self.fleet.replicas["replica-0"]

    def start(self, interval_s: float, *, reports_prefixes: bool = False) -> None:
        heard = self.listeners
        self.reports = StatusReporter(
            "replica-0",
            self.replica.thread,
            self.replica.service,
            heard,
            heard,
            [heard],
            delta_reporter=DeltaReporter(ORIGIN),
            is_draining=lambda: self.is_draining,
            interval_s=interval_s,
            clock=time.monotonic,
            reports_prefixes=reports_prefixes,
        )
        self.running = asyncio.create_task(self.reports.run())

    async def use(self, request_id: str, adapter: LoraAdapter) -> None:
        self.fleet.adapters[adapter.card.digest] = adapter
        async for _ in self.dispatcher.stream(fake_request(request_id, [1, 2], adapter)):
            pass

    async def close(self) -> None:
        assert self.running is not None
        self.running.cancel()
        await asyncio.wait([self.running])
        self.reports.close()
        await self.dispatcher.close()
        self.fleet.stop()


@pytest_asyncio.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(module, "OBSERVE_INTERVAL_S", 0.02)
    monkeypatch.setattr(module, "MIN_REPORT_INTERVAL_S", 0.0)
    bench = Bench()
    yield bench
    await bench.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("reports_prefixes", [True, False])
async def test_placement_hears_what_prompts_began_with_if_it_wants_to(bench: Bench, *, reports_prefixes: bool) -> None:
    bench.start(interval_s=0.001, reports_prefixes=reports_prefixes)
    request = fake_request("long", [index % 50 for index in range(200)])
    async for _ in bench.dispatcher.stream(request):
        pass
    heard = bench.listeners.reports
    count = len(heard)
    await until(lambda: len(heard) > count + 1)  # the last of them was begun after the answer's end
    told = {head.hex() for news in heard for head in news.cached_prefixes}
    assert told == ({PrefixHasher(FAKE_BASE, LIMITS.block_size).of(request)} if reports_prefixes else set())


async def test_placement_hears_where_an_adapter_is_before_its_interval_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OBSERVE_INTERVAL_S", 1e6)
    adapter = fake_adapter("a", 8)
    bench.start(interval_s=1e6)
    await until(lambda: len(bench.listeners.reports) == 1)
    assert bench.listeners.reports[0] == ReplicaDelta(
        "replica-0", 1, is_whole=True, identity=ORIGIN, num_rank_rows=64, num_kv_tokens=256 * 8
    )
    await bench.use("r", adapter)
    await until(lambda: bench.listeners.resident == {adapter.card.digest})
    assert set(bench.listeners.reports[-1].used_s) == {adapter.card.digest}


async def test_requests_that_move_no_adapter_are_no_reason_to_report(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OBSERVE_INTERVAL_S", 1e6)
    adapter = fake_adapter("a", 8)
    bench.start(interval_s=1e6)
    await bench.use("r", adapter)
    await until(lambda: bench.listeners.resident == {adapter.card.digest})
    num_reports = len(bench.listeners.reports)
    for index in range(5):
        await bench.use(f"again{index}", adapter)
        await until(lambda: not bench.replica.service.changed.is_set())
    assert len(bench.listeners.reports) == num_reports


async def test_placement_that_has_missed_something_is_told_the_whole(bench: Bench) -> None:
    adapter = fake_adapter("a", 8)
    bench.start(interval_s=0.01)
    await bench.use("r", adapter)
    await until(lambda: bench.listeners.resident == {adapter.card.digest})
    bench.listeners.resident, bench.listeners.wants_whole = set(), True  # it has restarted
    await until(lambda: bench.listeners.resident == {adapter.card.digest})


async def test_a_replica_that_serve_ends_says_so_and_goes_on_saying_so(bench: Bench) -> None:
    bench.start(interval_s=0.01)
    await until(lambda: len(bench.listeners.reports) > 1)
    assert not any(news.is_draining for news in bench.listeners.reports)
    bench.is_draining = True
    await until(lambda: sum(news.is_draining for news in bench.listeners.reports) > 2)


async def test_the_registry_hears_only_news(bench: Bench) -> None:
    a, b = fake_adapter("a", 8), fake_adapter("b", 8)
    bench.start(interval_s=0.01)
    await bench.use("r0", a)
    await until(lambda: bool(bench.listeners.observed))
    num_updates = bench.listeners.num_updates
    await until(lambda: bench.listeners.num_updates > num_updates + 3)
    observed = [*bench.listeners.observed]  # one, or its use before it is resident, and then that it is
    assert [digest for loaded, _, _ in observed for digest in loaded] == [a.card.digest]
    assert {digest for _, _, used_s in observed for digest in used_s} == {a.card.digest}
    assert not any(unloaded for _, unloaded, _ in observed)
    assert len(observed) <= 2
    await bench.use("r1", b)
    assert bench.replica.thread.unload_adapter(a.card.digest).result(60) > 0
    await until(lambda: [a.card.digest] in [gone for _, gone, _ in bench.listeners.observed])
    assert sorted(digest for loaded, _, _ in bench.listeners.observed for digest in loaded) == sorted(
        [a.card.digest, b.card.digest]
    )


async def test_a_registry_that_is_away_hears_later_and_delays_no_report(bench: Bench) -> None:
    adapter = fake_adapter("a", 8)
    bench.listeners.registry_error = NotReady("the database is away")
    bench.start(interval_s=0.01)
    await bench.use("r", adapter)
    num_updates = bench.listeners.num_updates
    await until(lambda: bench.listeners.num_updates > num_updates + 3)
    assert bench.listeners.observed == []
    bench.listeners.registry_answers.clear()  # and now it does not even say so
    num_reports = len(bench.listeners.reports)
    await until(lambda: len(bench.listeners.reports) > num_reports + 10)
    bench.listeners.registry_error = None
    bench.listeners.registry_answers.set()
    await until(lambda: bool(bench.listeners.observed))
    loaded, _, used_s = bench.listeners.observed[0]
    assert (loaded, set(used_s)) == ([adapter.card.digest], {adapter.card.digest}), "nothing was forgotten"


async def test_placement_that_is_away_is_told_again(bench: Bench) -> None:
    bench.listeners.placement_error = ActorUnavailable("gone", retry_after_s=1)
    bench.start(interval_s=0.01)
    await until(lambda: bench.listeners.num_updates > 2)
    bench.listeners.placement_error = None
    await until(lambda: bool(bench.listeners.reports))
    assert bench.listeners.reports[0].is_whole


async def test_a_failed_engine_is_said_to_be_gone(bench: Bench) -> None:
    bench.start(interval_s=0.01)
    await until(lambda: bool(bench.listeners.reports))
    bench.replica.backend.fail_at = 0
    bench.replica.thread.submit(fake_request("r", [1]))
    await until(lambda: bench.replica.thread.failure is not None)
    assert bench.running is not None
    await asyncio.wait([bench.running])
    assert bench.running.exception() is None
    assert bench.listeners.reports[-1].is_draining


@pytest.mark.parametrize("error", [ConfigError("a damaged table"), TypeError("of another version"), TimeoutError()])
async def test_no_error_of_placement_or_the_registry_ends_the_reports(bench: Bench, error: Exception) -> None:
    adapter = fake_adapter("a", 8)
    bench.listeners.placement_error = bench.listeners.registry_error = error
    bench.start(interval_s=0.01)
    await bench.use("r", adapter)
    num_updates = bench.listeners.num_updates
    await until(lambda: bench.listeners.num_updates > num_updates + 3)
    assert (bench.listeners.reports, bench.listeners.observed) == ([], [])
    bench.listeners.placement_error = bench.listeners.registry_error = None
    await until(lambda: bool(bench.listeners.reports) and bool(bench.listeners.observed))
    assert bench.listeners.observed[0][0] == [adapter.card.digest], "nothing was forgotten"


async def test_placement_that_does_not_answer_delays_one_report_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPORT_TIMEOUT_S", 0.01)
    answers = asyncio.Event()

    async def report(_: ReplicaDelta) -> bool:
        return await answers.wait()

    monkeypatch.setattr(bench.listeners, "report", report)
    bench.start(interval_s=0.01)
    await until(lambda: bench.listeners.num_updates > 2)


async def test_of_use_that_nobody_hears_the_newest_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNREPORTED", 2)
    bench.listeners.registry_error = NotReady("away")
    bench.start(interval_s=0.01)
    adapters = [fake_adapter(name, 8) for name in "abc"]
    for adapter in adapters:
        await bench.use(f"r-{adapter.card.digest}", adapter)
        await asyncio.sleep(0.002)  # Unix times of their own
    num_updates = bench.listeners.num_updates
    await until(lambda: bench.listeners.num_updates > num_updates + 2)
    bench.listeners.registry_error = None
    await until(lambda: bool(bench.listeners.observed))
    assert set(bench.listeners.observed[0][2]) == {adapter.card.digest for adapter in adapters[1:]}


async def test_placement_is_told_what_tenants_were_served(bench: Bench) -> None:
    bench.start(interval_s=0.01)
    await until(lambda: bool(bench.listeners.reports))
    await bench.use("r", fake_adapter("a", 8))
    await until(lambda: any(news.served for news in bench.listeners.reports))
    total = bench.replica.thread.service().served["default"]
    await until(lambda: any(news.served.get("default") == total for news in bench.listeners.reports))
    num_reports = len(bench.listeners.reports)
    await until(lambda: len(bench.listeners.reports) > num_reports + 2)
    assert not bench.listeners.reports[-1].served, "nothing has changed since"
    assert bench.listeners.asked == [], "no tenant waits"


async def test_where_tenants_wait_placement_is_asked_what_they_were_served_elsewhere(bench: Bench) -> None:
    """Service between two answers counts; service during an outage of placement does not."""
    heard: list[tuple[dict[str, float], bool]] = []
    engine = bench.replica.thread
    engine.service = lambda: TenantService({}, waiting)  # type: ignore[method-assign]
    engine.add_remote_service = lambda served, *, continues: heard.append((dict(served), continues))  # type: ignore[method-assign]
    waiting: tuple[str, ...] = ("a",)
    bench.start(interval_s=0.01)
    await until(lambda: len(bench.listeners.reports) > 2)
    assert bench.listeners.asked == [], "whose turn it is is no question"
    waiting = ("a", "b")
    bench.listeners.elsewhere = {"a": 5.0, "c": 1.0}
    await until(lambda: len(heard) >= 3)
    assert heard[:2] == [({"a": 5.0, "b": 0.0}, False), ({"a": 5.0, "b": 0.0}, True)]
    bench.listeners.elsewhere_error = AttributeError("a mistake")
    num_asked, num_reports = len(bench.listeners.asked), len(bench.listeners.reports)
    await until(lambda: len(bench.listeners.asked) > num_asked and len(bench.listeners.reports) > num_reports + 2)
    num_heard = len(heard)
    bench.listeners.elsewhere_error = None
    await until(lambda: len(heard) >= num_heard + 2)
    assert [continues for _, continues in heard[num_heard : num_heard + 2]] == [False, True]


async def test_an_answer_about_elsewhere_that_does_not_come_delays_no_report(bench: Bench) -> None:
    never = asyncio.Event()

    async def served_elsewhere(_: str, __: Sequence[str]) -> Mapping[str, float]:
        await never.wait()
        return {}

    bench.listeners.served_elsewhere = served_elsewhere  # type: ignore[method-assign]
    bench.replica.thread.service = lambda: TenantService({}, ("a", "b"))  # type: ignore[method-assign]
    bench.start(interval_s=0.01)
    await until(lambda: len(bench.listeners.reports) > 5)
