"""Requests go where what their prompts begin with is cached, within the bound on load, and to nobody else's cache."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

from app.deployments.ingress.dispatch.request_router import PrefixHasher
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaDelta, ReplicaReport
from app.deployments.placement.policy import PlacementPolicy
from app.deployments.placement.replica_choice import PREFIX_LOAD_FACTOR, PREFIX_LOAD_MARGIN, choose_replica
from app.deployments.placement.view import PlacementView
from app.engine.pools.block_pool import MAX_CACHED_PREFIXES
from tests.deployments.placed import ORIGIN
from tests.deployments.placement.reporting_fleet import LEAST_LOADED, STICKY, ReportingFleet
from tests.fakes import fake_request

ONE, TWO = b"head one", b"head two"


def fleet(**heads: tuple[bytes, ...]) -> ReportingFleet:
    """Replicas that have these cached."""
    books = ReportingFleet()
    for replica_id, cached in heads.items():
        books.hear(ReplicaReport(replica_id, cached_prefixes=cached), 0.0)
    return books


def chosen(
    books: ReportingFleet,
    head: bytes | None,
    loads: dict[str, int] | None = None,
    *,
    digest: str | None = None,
    policy: PlacementPolicy = STICKY,
    usable: list[str] | None = None,
) -> set[str]:
    """The replicas that 200 such requests go to."""
    usable = usable or books.replicas
    load = (loads or {}).get
    draw = random.Random(0)
    return {
        choose_replica(
            digest, books.view, policy, dict.fromkeys(usable), usable, lambda each: load(each, 0), draw,
            lambda: None if head is None else head.hex(),
        )
        for _ in range(200)
    }  # fmt: skip


def test_a_prompt_goes_where_its_head_is_cached() -> None:
    books = fleet(r0=(), r1=(ONE,), r2=(TWO,), r3=(ONE, TWO))
    assert chosen(books, ONE) == {"r1", "r3"}
    assert chosen(books, TWO) == {"r2", "r3"}
    assert chosen(books, b"head six") == chosen(books, None) == {"r0", "r1", "r2", "r3"}
    assert chosen(books, ONE, policy=LEAST_LOADED) == {"r1", "r3"}


def test_of_those_that_have_it_the_less_loaded_takes_it() -> None:
    books = fleet(r0=(ONE,), r1=(ONE,), r2=())
    assert chosen(books, ONE, {"r0": 1}) == {"r1"}


def test_a_replica_that_has_too_much_to_do_is_passed_over() -> None:
    books = fleet(r0=(ONE,), r1=(), r2=())
    assert chosen(books, ONE, {"r0": PREFIX_LOAD_MARGIN}) == {"r0"}
    assert "r0" not in chosen(books, ONE, {"r0": PREFIX_LOAD_MARGIN + 1})
    busy = {"r1": 100, "r2": 100}
    assert chosen(books, ONE, busy | {"r0": int(PREFIX_LOAD_FACTOR * 100)}) == {"r0"}
    assert "r0" not in chosen(books, ONE, busy | {"r0": int(PREFIX_LOAD_FACTOR * 100) + 1})


def test_an_adapter_stays_at_its_homes_whoever_has_its_prompt() -> None:
    books = fleet(r0=(), r1=(), r2=(ONE,), r3=(ONE,))
    books.view.apply({("assigned", "d"): ("r0", "r2"), ("assigned", "e"): ("r1",)})
    assert chosen(books, ONE, digest="d") == {"r2"}
    assert chosen(books, ONE, digest="e") == {"r1"}


def test_a_replica_that_cannot_be_used_takes_nothing() -> None:
    books = fleet(r0=(ONE,), r1=(), r2=())
    assert chosen(books, ONE, usable=["r1", "r2"]) == {"r1", "r2"}
    books.leave("r0")
    assert chosen(books, ONE) == {"r1", "r2"}
    assert not books.view.has_prefixes


def test_nothing_is_computed_of_a_prompt_where_it_makes_no_difference() -> None:
    def asked() -> str | None:
        raise AssertionError("the prompt was looked at")

    def place(books: ReportingFleet, digest: str | None = None) -> None:
        ids = books.replicas
        choose_replica(digest, books.view, STICKY, dict.fromkeys(ids), ids, lambda _: 0, random.Random(0), asked)

    place(fleet(r0=(ONE,)))  # one replica
    place(fleet(r0=(), r1=()))  # nobody tells of heads
    books = fleet(r0=(ONE,), r1=())
    books.view.apply({("assigned", "d"): ("r1",)})
    place(books, "d")  # one home


def test_a_tenant_is_not_sent_where_another_s_equal_prompt_is_cached() -> None:
    heads = PrefixHasher("base", 16)
    prompt = fake_request("r", [7] * 300, cache_salt=b"one")
    mine, other = heads.of(prompt), heads.of(replace(prompt, cache_salt=b"two"))
    assert mine is not None
    assert other is not None
    books = fleet(r0=(), r1=(bytes.fromhex(mine),), r2=())
    assert chosen(books, bytes.fromhex(mine)) == {"r1"}
    assert chosen(books, bytes.fromhex(other)) == {"r0", "r1", "r2"}


def test_only_changes_are_told_and_the_table_follows_them() -> None:
    books, reporter = ReportingFleet(), DeltaReporter(ORIGIN)

    def tell(*heads: bytes) -> ReplicaDelta:
        news = reporter.next_delta(ReplicaReport("r0", cached_prefixes=heads))
        assert books.report(news, 0.0)
        return news

    def known() -> set[str]:
        return {head for head in (ONE.hex(), TWO.hex()) if books.view.replicas_with_prefix(head)}

    assert tell(ONE).cached_prefixes == (ONE,)
    books.take_changes()
    assert tell(ONE).cached_prefixes == ()
    assert ("prefixes", "r0") not in books.take_changes(), "nothing has changed"
    news = tell(TWO, ONE)
    assert (news.cached_prefixes, news.dropped_prefixes) == ((TWO,), ())
    assert books.take_changes() == {("prefixes", "r0"): (ONE.hex(), TWO.hex())}
    assert known() == {ONE.hex(), TWO.hex()}
    news = tell(TWO)
    assert (news.cached_prefixes, news.dropped_prefixes) == ((), (ONE,))
    assert known() == {TWO.hex()}
    reporter.reset()
    assert tell(ONE).is_whole
    assert known() == {ONE.hex()}, "a whole message stands alone"


def test_a_message_is_no_longer_than_the_heads_that_are_told() -> None:
    reporter = DeltaReporter(ORIGIN)
    one, two = (tuple(bytes([half, index] * 4) for index in range(MAX_CACHED_PREFIXES)) for half in (1, 2))
    reporter.next_delta(ReplicaReport("r0"))
    none = len(pickle.dumps(reporter.next_delta(ReplicaReport("r0"))))
    reporter.next_delta(ReplicaReport("r0", cached_prefixes=one))
    assert (
        len(pickle.dumps(reporter.next_delta(ReplicaReport("r0", cached_prefixes=two))))
        < none + 2 * MAX_CACHED_PREFIXES * 12
    )


def test_a_copy_of_the_table_forgets_what_is_no_more() -> None:
    books, view = fleet(r0=(ONE,), r1=(TWO,)), PlacementView()
    view.apply({("prefixes", "gone"): (ONE.hex(),), ("prefixes", "r1"): (ONE.hex(),)})
    view.apply(dict(books.take_changes()) | {("prefixes", "gone"): None})
    assert [*view.replicas_with_prefix(ONE.hex())] == ["r0"]
    assert [*view.replicas_with_prefix(TWO.hex())] == ["r1"]
