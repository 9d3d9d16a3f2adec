"""The ledger: every batch once, sums by time and group, and the way there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import PriceConfig
from app.deployments.registry.db.database import Database, sqlite_url
from app.deployments.registry.db.tenant_tables import ledger as ledger_table
from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.deployments.tenancy.models import RateLimit, Tenant, TenantLimits
from app.deployments.tenancy.quota.limits import Cost, request_costs
from app.deployments.tenancy.usage.flusher import LedgerKey, Row, UsageFlusher, UsageRecord
from app.deployments.tenancy.usage.ledger import Ledger
from app.deployments.tenancy.usage.prices import Prices, paid_models
from app.deployments.tenancy.usage.queries import BUCKET_SIZES, UsageQuery, next_page, usage_query
from app.deployments.tenancy.usage.recorder import UsageRecorder
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import MAX_PARTS, CombinationPart, make_combination
from app.engine.errors import InvalidRequest, NotReady
from app.engine.request import RequestUsage, Usage
from tests.budgets import examples
from tests.fakes import fake_request

NOW_S = 1_000_000_000
MINUTE = NOW_S // 60


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(tmp_path / "registry.sqlite"), "base", lambda: float(NOW_S))
    yield database
    database.close()


def key(minute: int = MINUTE, project: str = "p", key_id: str = "k", model: str = "m") -> LedgerKey:
    return LedgerKey(minute, project, key_id, model, "", "completions")


def query(width: str = "1m", *, start_s: int = NOW_S, num: int = 5, **changes: object) -> UsageQuery:
    options = {"limit": None, "page": None, "only": {}, "group_by": (), "route_kind": "completions"} | changes
    seconds = BUCKET_SIZES[width].seconds
    return usage_query(start_s, start_s + num * seconds, BUCKET_SIZES[width], **options)  # type: ignore[arg-type]


def test_a_batch_is_written_once_however_often_it_is_sent(database: Database) -> None:
    ledger = Ledger(database)
    rows: Sequence[Row] = [(key(), UsageRecord(1, 10, 4, 5, cost_nanos=7)), (key(model="n"), UsageRecord(1, 1, 0, 1))]
    assert ledger.record("ingress-a", 1, rows)
    assert not ledger.record("ingress-a", 1, rows)
    assert ledger.record("ingress-b", 1, rows)
    assert ledger.record("ingress-a", 2, rows)
    assert not ledger.record("ingress-a", 1, rows), "one that was overtaken by its own successor"
    assert ledger.total() == UsageRecord(6, 33, 12, 18, cost_nanos=21)


def test_a_batch_that_fails_half_way_is_not_there(database: Database) -> None:
    ledger = Ledger(database)
    good, bad = (key(), UsageRecord(1, 10)), (key(project="x" * 10), UsageRecord(1, None))  # type: ignore[arg-type]
    with pytest.raises(NotReady):
        ledger.record("a", 1, [good, bad])
    assert ledger.total() == UsageRecord()
    assert ledger.record("a", 1, [good])


async def test_the_name_of_several_adapters_at_once_fits() -> None:
    """PostgreSQL refuses what is longer, and with it the batch."""
    batches: list[Sequence[Row]] = []

    async def write(_: str, __: int, rows: Sequence[Row]) -> None:
        batches.append(rows)

    flusher = UsageFlusher(write, "a")
    counting = UsageRecorder(flusher, Prices({}, "base"), "base", lambda: float(NOW_S))
    parts = [CombinationPart(AdapterRef(f"{index:x}" * 128, f"{index:x}" * 64, "p"), 0.5) for index in range(MAX_PARTS)]
    ref = make_combination(parts).ref("p")
    request = replace(fake_request("r", [1]), adapter=ref, key_id="k")
    counting.record_request(request)
    counting.record_usage(request, RequestUsage(prompt_tokens=3))
    counting.record_load(ref, 10)
    await flusher.flush()
    keys = [key for key, _ in batches[0]]
    assert [each.digest for each in keys] == [ref.digest] * 2
    assert max(len(each.model) for each in keys) == vars(ledger_table.c.model.type)["length"]


async def test_a_ledger_that_is_away_is_told_of_by_who_called_it(caplog: pytest.LogCaptureFixture) -> None:
    errors = [ActorUnavailable("the store restarts"), NotReady("the database is locked")]

    async def write(_: str, __: int, ___: Sequence[Row]) -> None:
        raise errors.pop(0)

    flusher = UsageFlusher(write, "a")
    flusher.add(key(), UsageRecord(1, 10))
    assert not await flusher.flush()
    assert caplog.messages == []
    assert not await flusher.flush()
    assert caplog.messages == ["1 rows of usage are still to be recorded: the database is locked"]


async def test_what_the_ledger_does_not_acknowledge_is_sent_again_as_it_was() -> None:
    seen: list[tuple[int, Sequence[Row]]] = []
    failures = [True, True, False, False]

    async def write(_: str, number: int, rows: Sequence[Row]) -> None:
        seen.append((number, rows))
        if failures.pop(0):
            raise NotReady("the ledger restarts")

    flusher = UsageFlusher(write, "a")
    flusher.add(key(), UsageRecord(1, 10))
    assert not await flusher.flush()
    flusher.add(key(), UsageRecord(1, 5))
    assert not await flusher.flush()
    assert await flusher.flush()
    first = ((key(), UsageRecord(1, 10)),)
    assert seen == [(1, first), (1, first), (1, first), (2, ((key(), UsageRecord(1, 5)),))]


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_crashes_of_the_ledger_and_lost_answers_lose_and_double_nothing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The write may fail before it is done, or be done and its answer lost."""
    import asyncio

    database = Database(sqlite_url(tmp_path_factory.mktemp("l") / "r.sqlite"), "base", lambda: float(NOW_S))
    ledger, total = Ledger(database), UsageRecord()

    async def write(writer: str, number: int, rows: Sequence[Row]) -> None:
        luck = data.draw(st.sampled_from(["done", "lost before", "lost after"]))
        if luck == "lost before":
            raise NotReady("away")
        ledger.record(writer, number, rows)
        if luck == "lost after":
            raise NotReady("away")

    async def run() -> None:
        nonlocal total
        writers = [UsageFlusher(write, name) for name in ("a", "b")]
        for _ in range(data.draw(st.integers(1, 15))):
            flusher = writers[data.draw(st.integers(0, 1))]
            charge = UsageRecord(1, data.draw(st.integers(0, 9)), 0, data.draw(st.integers(0, 9)))
            flusher.add(key(project=data.draw(st.sampled_from("pq"))), charge)
            total = total.plus(charge)
            await flusher.flush()
        for flusher in writers:
            while not await flusher.flush():
                pass

    asyncio.run(run())
    assert ledger.total() == total
    database.close()


def test_buckets_filters_and_groups(database: Database) -> None:
    ledger = Ledger(database)
    ledger.record(
        "a",
        1,
        [
            (key(MINUTE), UsageRecord(1, 10, 5, 2)),
            (key(MINUTE, key_id="k2"), UsageRecord(2, 20, 0, 3)),
            (key(MINUTE + 1, project="q", model="n"), UsageRecord(1, 7, 0, 1)),
            (key(MINUTE + 700), UsageRecord(1, 100, 0, 1)),
        ],
    )
    whole = ledger.buckets(query("1m", num=3))
    assert [bucket.start_s for bucket in whole] == [60 * (MINUTE + index) for index in range(4)]
    assert [[charge.prompt_tokens for _, charge in bucket.results] for bucket in whole] == [[30], [7], [], []]
    by_key = ledger.buckets(query("1m", num=1, group_by=["api_key_id"]))
    assert by_key[0].results == (
        ({"key_id": "k"}, UsageRecord(1, 10, 5, 2)),
        ({"key_id": "k2"}, UsageRecord(2, 20, 0, 3)),
    )
    only = ledger.buckets(query("1h", num=1, only={"project_id": ["q"]}, group_by=["model", "project_id"]))
    assert [bucket.results for bucket in only if bucket.results] == [
        (({"model": "n", "project_id": "q"}, UsageRecord(1, 7, 0, 1)),)
    ]
    days = ledger.buckets(query("1d", num=2))
    assert sum(charge.num_requests for bucket in days for _, charge in bucket.results) == 5
    assert all(bucket.start_s % 86_400 == 0 for bucket in days)


def test_pages_are_whole_and_do_not_overlap() -> None:
    page, starts = None, []
    while True:
        one = query("1m", num=130, page=page)
        starts += range(one.start_s, one.end_s, 60)
        page = next_page(one)
        if page is None:
            break
    assert starts == sorted(set(starts))
    assert len(starts) == 131


@pytest.mark.parametrize(
    "change", [{"limit": 0}, {"limit": 1441}, {"page": "2"}, {"page": "page_x"}, {"group_by": ["salt"]}]
)
def test_what_cannot_be_asked_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        query("1m", **change)


def test_prices_are_whole_nanos() -> None:
    prices = Prices(
        {"base": PriceConfig(input=0.15, cached_input=0.075, output=0.6), "sql": PriceConfig(output=1)}, "base"
    )
    assert prices.of(("base",), Usage(100, 40, 10)) == 60 * 150 + 40 * 75 + 10 * 600
    assert prices.of(("unpriced",), Usage(1, 0, 0)) == 150
    assert prices.of(("sql",), Usage(100, 0, 10)) == 10 * 1000
    assert prices.at_most(("base",), 100, 10) == 100 * 150 + 10 * 600
    assert Prices({}, "base").of(("base",), Usage(9, 0, 9)) == 0


def test_several_adapters_cost_what_the_dearest_does() -> None:
    prices = Prices(
        {
            "base": PriceConfig(input=1),
            "dear": PriceConfig(input=9),
            "free": PriceConfig(),
            "proj_t:own": PriceConfig(input=2),
        },
        "base",
    )
    dear, unpriced, free = (AdapterRef(name, name, "default") for name in ("dear", "unpriced", "free"))

    def cost(*parts: AdapterRef, weight: float = 0.5) -> int:
        ref = make_combination([CombinationPart(each, weight) for each in parts]).ref("proj_t")
        return prices.of(paid_models(ref, "base"), Usage(1, 0, 0))

    assert [cost(dear), cost(dear, free), cost(free, unpriced)] == [9000, 9000, 1000]
    assert (cost(free, weight=1.0), cost(free)) == (0, 1000), "with a small weight it is the base"
    registered = AdapterRef(
        "mine", "d", "proj_t", 1, make_combination([CombinationPart(dear, 1.0), CombinationPart(free, 1.0)]).source
    )
    assert prices.of(paid_models(registered, "base"), Usage(1, 0, 0)) == 9000
    assert cost(registered, free) == 9000
    priced = AdapterRef("own", "d", "proj_t", 1, registered.uri)
    assert prices.of(paid_models(priced, "base"), Usage(1, 0, 0)) == 9000, "a price of its own is no discount"
    assert paid_models(None, "base") == ("base",)


def test_a_name_that_a_project_chooses_has_no_price() -> None:
    """The operator's prices are of the base, of public adapters, and of one project's adapter."""
    prices = Prices(
        {"base": PriceConfig(input=5), "promo": PriceConfig(), "proj_a:tuned": PriceConfig(input=1)}, "base"
    )
    used = Usage(1000, 0, 0)
    for owner_id, name, expected in (
        ("default", "promo", 0),
        ("proj_a", "promo", 5_000_000),
        ("proj_a", "tuned", 1_000_000),
        ("proj_b", "tuned", 5_000_000),
        ("default", "tuned", 5_000_000),
    ):
        assert prices.of(paid_models(AdapterRef(name, "d", owner_id), "base"), used) == expected, (owner_id, name)


def test_a_limit_is_one_owner_s_adapter_s() -> None:
    """Also as a part; whoever else has an adapter of this name is not limited by it."""
    limits = TenantLimits({"legal": RateLimit(requests_per_min=1), "proj_a:own": RateLimit(requests_per_min=2)})
    tenant = Tenant("proj_a", "a", 0.0, limits=limits)

    def limited(ref: AdapterRef) -> list[str]:
        return [key.model for key in request_costs(tenant, "base", [Cost(paid_models(ref, "base"), 1, 0)])]

    public, own = AdapterRef("legal", "a", "default"), AdapterRef("own", "b", "proj_a")
    both = make_combination([CombinationPart(public, 0.5), CombinationPart(own, 0.5)]).ref("proj_a")
    assert [limited(public), limited(own), sorted(limited(both))] == [
        ["legal"],
        ["proj_a:own"],
        ["legal", "proj_a:own"],
    ]
    assert limited(AdapterRef("legal", "c", "proj_a")) == limited(AdapterRef("own", "c", "proj_b")) == []


def test_what_is_spent_is_this_month_s(database: Database) -> None:
    ledger = Ledger(database)
    ledger.record(
        "a", 1, [(key(MINUTE), UsageRecord(cost_nanos=5)), (key(MINUTE - 40 * 1440), UsageRecord(cost_nanos=50))]
    )
    assert ledger.project_spend("p", float(NOW_S)) == 5
    assert ledger.project_spend("nobody", float(NOW_S)) == 0
