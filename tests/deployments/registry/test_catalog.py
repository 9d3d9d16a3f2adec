"""Names and what they mean: generations that only rise, one namespace, use that is remembered in order."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from app.deployments.registry.catalog import Catalog, Move
from app.deployments.registry.db import adapter_queries
from app.deployments.registry.db.adapter_queries import MAX_UNLOADED_NAMES
from app.deployments.registry.models import CatalogEntry, LoadRequest, State
from app.deployments.registry.pins import EngineCapacity, PinLimits
from app.deployments.registry.registry import Registry
from app.engine.adapters.card import AdapterRef
from app.engine.errors import AdapterBusy, AdapterTooLarge, InvalidRequest, NotFound
from tests.budgets import examples
from tests.deployments.managed import ADA, MINE, card, register


def add(registry: Registry, name: str, digest: str = "d", **options: object) -> CatalogEntry:
    return register(registry.catalog, name, f"/{name}", digest, max_rank=8, size_bytes=5_000_000_000, **(ADA | options))


def test_a_view_is_read_in_pages_and_its_transaction_is_never_idle_for_long(
    open_again: Callable[..., Registry], shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server ends transactions whose client says nothing for a minute: so long it makes entries of a million rows."""
    monkeypatch.setattr(adapter_queries, "_READ_AT_ONCE", 2)
    registry, names = open_again(), [f"name-{index}" for index in range(7)]
    for name in names:
        add(registry, name)
    asked: list[datetime] = []  # when the reader last asked the server for something, at each entry that is made
    entry_of = adapter_queries.entry_of

    def observed(row: Mapping[str, Any]) -> CatalogEntry:
        if not shared_url.startswith("sqlite"):  # which has no server
            with registry.database.read() as connection:
                query = "SELECT query_start FROM pg_stat_activity WHERE state = 'idle in transaction' AND pid = :pid"
                asked.append(connection.execute(text(query).bindparams(pid=reader)).scalar_one())
        return entry_of(row)

    monkeypatch.setattr(adapter_queries, "entry_of", observed)
    with registry.database.read() as connection:
        driver: Any = connection.connection.dbapi_connection
        reader = None if shared_url.startswith("sqlite") else driver.info.backend_pid
        rows = adapter_queries.changed_adapters(connection, registry.database.base_digest, 0)
    assert [key for _, key, _ in rows] == [("default", name) for name in names]
    assert [entry.ref.name for _, _, entry in rows if isinstance(entry, CatalogEntry)] == names
    assert len(asked) in (0, len(names))
    assert all(number <= 2 for number in Counter(asked).values()), "no more than a page between two questions"


@given(events=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y", None])), max_size=20))
@settings(max_examples=examples(20), deadline=None)
def test_generations_rise_exactly_when_a_name_changes_its_meaning(
    shared_url: str, events: list[tuple[str, str | None]]
) -> None:
    registry = Registry(shared_url, secrets.token_hex(32))
    catalog = registry.catalog
    model: dict[str, tuple[int, str, bool]] = {}
    for name, digest in events:
        old = model.get(name)
        if digest is None:
            if old is not None and old[2]:
                entry, job, _ = catalog.begin_unload(name, **ADA)
                assert (entry.ref.generation, entry.ref.digest) == old[:2]
                if len(model) % 2:  # killed before the removal was complete, or not
                    catalog.finish_unload(job)
                model[name] = (old[0], old[1], False)
            else:
                with pytest.raises(NotFound):
                    catalog.begin_unload(name, **ADA)
            continue
        entry = register(catalog, name, "uri", digest, max_rank=8, size_bytes=1, **ADA)
        generation = 1 if old is None else old[0] + (old[1] != digest or not old[2])
        model[name] = (generation, digest, True)
        assert entry.ref == AdapterRef(name, digest, "default", generation, "uri")
    living = {name: value[:2] for name, value in model.items() if value[2]}
    assert {entry.ref.name: (entry.ref.generation, entry.ref.digest) for entry in catalog.entries()} == living
    for name, (generation, digest, is_living) in model.items():
        history = catalog.generations(name, **MINE)
        assert [item.ref.generation for item in history] == list(range(generation, 0, -1)), "none was given twice"
        assert history[0].ref.digest == digest
        assert (catalog.get(name, **MINE) is not None) == is_living
    for digest in "xy":
        assert catalog.is_used(digest) == any(value[1] == digest and value[2] for value in model.values())
    registry.close()


def test_bases_and_tenants_keep_their_own_names(shared_url: str) -> None:
    bases = [Registry(shared_url, secrets.token_hex(32)) for _ in range(2)]
    for number, registry in enumerate(bases):
        for tenant in ("ada", "bob"):
            add(registry, "sql", f"{tenant}{number}", tenant_id=tenant)
    assert [entry.ref.digest for entry in bases[0].catalog.entries()] == ["ada0", "bob0"]
    assert [entry.ref.digest for entry in bases[1].catalog.entries()] == ["ada1", "bob1"]
    bases[0].catalog.begin_unload("sql", tenant_id="ada", who="ada")
    assert bases[0].catalog.get("sql", tenant_id="ada") is None
    assert bases[0].catalog.get("sql", tenant_id="bob") is not None
    assert bases[1].catalog.get("sql", tenant_id="ada") is not None
    for registry in bases:
        registry.close()


def test_pins_and_weights_last_until_the_name_is_removed(
    registry: Registry, open_again: Callable[[], Registry]
) -> None:
    entry = add(registry, "sql", who="ada", pinned=True)
    assert (entry.owner, entry.pinned, entry.traffic_weight, entry.size_bytes) == ("ada", True, 1.0, 5_000_000_000)
    assert registry.catalog.configure("sql", traffic_weight=2.5, who="bob", **MINE).pinned
    entry = add(open_again(), "sql", "other", who="bob")
    assert (entry.owner, entry.pinned, entry.traffic_weight) == ("ada", True, 2.5), "new contents, same treatment"
    assert not add(registry, "sql", pinned=False).pinned
    _, leaving, _ = registry.catalog.begin_unload("sql", **ADA)
    registry.catalog.finish_unload(leaving)
    entry = add(registry, "sql", who="bob")
    assert (entry.owner, entry.pinned, entry.traffic_weight) == ("bob", False, 1.0)
    with pytest.raises(NotFound, match="'absent'"):
        registry.catalog.configure("absent", pinned=True, **ADA)


def test_a_description_stays_with_new_contents_that_have_none(registry: Registry) -> None:
    assert add(registry, "sql", description="its card's").description == "its card's"
    assert registry.catalog.configure("sql", description="an operator's", **ADA).description == "an operator's"
    assert add(registry, "sql", "trained again").description == "an operator's"
    assert add(registry, "sql", "described", description="another card's").description == "another card's"
    request = LoadRequest("default", "sql", "/sql", "ada", description="")
    assert registry.catalog.register(request, "/sql", card("described")).description == "", "as requested"
    registry.catalog.configure("sql", description="an operator's", **ADA)
    _, leaving, _ = registry.catalog.begin_unload("sql", **ADA)
    registry.catalog.finish_unload(leaving)
    assert add(registry, "sql").description == "", "an unloaded name begins anew"


def test_a_name_that_returns_while_it_drains_stays(registry: Registry) -> None:
    add(registry, "sql")
    entry, leaving, _ = registry.catalog.begin_unload("sql", **ADA)
    assert registry.jobs.unfinished_jobs("unload") == [leaving] == [registry.jobs.latest("sql", **MINE)]
    assert (leaving.state, leaving.generation, leaving.digest) == (State.DRAINING, entry.ref.generation, "d")
    back = add(registry, "sql")
    assert back.ref.generation == entry.ref.generation + 1
    for _ in range(2):  # two may end it
        assert registry.catalog.finish_unload(leaving).state is State.REMOVED
    assert registry.catalog.get("sql", **MINE) == back
    assert registry.jobs.unfinished_jobs("unload") == []


def test_use_is_remembered_in_order(registry: Registry, open_again: Callable[[], Registry]) -> None:
    for name in "abcd":
        add(registry, name, f"digest-{name}")
    add(registry, "twin", "digest-a")
    registry.catalog.note_use({"digest-a": 10.0, "digest-b": 12.0, "digest-c": 11.0, "unknown": 99.0})
    registry.catalog.note_use({"digest-d": 9.0, "digest-c": 8.0})
    registry.catalog.note_use({})
    after: Catalog = open_again().catalog
    assert [entry.name for entry in after.hot(10)] == ["b", "c", "a", "d"], "the last used first, each digest once"
    assert [entry.name for entry in after.hot(2)] == ["b", "c"]
    found = after.get("twin", **MINE)
    assert found is not None
    assert found.last_used_s == 10.0
    after.begin_unload("c", **ADA)
    assert [entry.name for entry in after.hot(10)] == ["b", "a", "d"]


def test_the_last_use_of_a_name_never_goes_back(registry: Registry) -> None:
    """Replicas tell of it in any order, and late if the registry was away."""
    add(registry, "a", "digest-a")
    for used_s, known_s in ((10.0, 10.0), (8.0, 10.0), (12.0, 12.0), (12.0, 12.0), (-1.0, 12.0)):
        registry.catalog.note_use({"digest-a": used_s})
        entry = registry.catalog.get("a", **MINE)
        assert entry is not None
        assert entry.last_used_s == known_s


def test_aliases_change_by_version(registry: Registry, open_again: Callable[[], Registry]) -> None:
    for name in ("v1", "v2"):
        add(registry, name)
    aliases = registry.aliases
    first = aliases.put("sql", {"v1": 1.0}, **ADA)
    canary = aliases.put("sql", {"v1": 95, "v2": 5}, who="ada", **MINE)
    assert [(item.name, item.weight) for item in canary.targets] == [("v1", 95.0), ("v2", 5.0)]
    assert (first.version, canary.version, canary.previous_version) == (1, 2, 1)
    promoted = aliases.promote("sql", "v2", **ADA)
    assert [item.name for item in promoted.targets] == ["v2"]
    back = open_again().aliases.rollback("sql", **ADA)
    assert (back.version, back.targets, back.previous_version) == (2, canary.targets, 3)
    assert aliases.rollback("sql", **ADA).targets == promoted.targets, "a rollback can be undone"
    assert aliases.rollback("sql", 1, **ADA).targets == first.targets
    after = aliases.put("sql", {"v2": 1}, **ADA)
    assert after.version == 4, "a version is never used for something else"
    assert aliases.entries() == [after]
    aliases.remove("sql", **ADA)
    assert aliases.get("sql", **MINE) is None
    assert aliases.entries() == []
    again = aliases.put("sql", {"v1": 1}, **ADA)
    assert (again.version, again.previous_version) == (5, None)


def test_what_an_alias_may_not_do(registry: Registry) -> None:
    add(registry, "v1")
    add(registry, "v2")
    aliases, catalog = registry.aliases, registry.catalog
    for targets in (
        {},
        {"v1": 0},
        {"v1": -1},
        {"v1": float("nan")},
        {"v1": float("inf")},
        {f"v{i}": 1 for i in range(17)},
    ):
        with pytest.raises(InvalidRequest):
            aliases.put("sql", targets, **ADA)
    with pytest.raises(NotFound, match="'v9'"):
        aliases.put("sql", {"v1": 1, "v9": 1}, **ADA)
    with pytest.raises(InvalidRequest, match="is an adapter"):
        aliases.put("v1", {"v2": 1}, **ADA)
    aliases.put("sql", {"v1": 1}, **ADA)
    with pytest.raises(InvalidRequest, match="is an alias"):
        add(registry, "sql")
    with pytest.raises(NotFound, match="'sql'"):
        aliases.put("of-an-alias", {"sql": 1}, **ADA)
    with pytest.raises(AdapterBusy, match="alias 'sql'"):
        catalog.begin_unload("v1", **ADA)
    with pytest.raises(InvalidRequest, match="no target"):
        aliases.promote("sql", "v2", **ADA)
    for version in (None, 7):
        with pytest.raises(InvalidRequest, match="version"):
            aliases.rollback("sql", version, **ADA)
    aliases.put("sql", {"v2": 1}, **ADA)
    catalog.begin_unload("v1", **ADA)
    with pytest.raises(NotFound, match="'v1'"):
        aliases.rollback("sql", **ADA)
    assert aliases.get("sql", **MINE) is not None
    for call in (aliases.remove, aliases.rollback, lambda name, **who: aliases.promote(name, "v2", **who)):
        with pytest.raises(NotFound, match="no alias 'absent'"):
            call("absent", **ADA)


def test_a_removed_alias_does_not_come_back_by_a_promotion(
    registry: Registry, open_again: Callable[[], Registry]
) -> None:
    """Two processes on one database: one promotes, again and again, what the other removes."""
    for name in ("v1", "v2"):
        add(registry, name)
    other, done = open_again().aliases, threading.Event()

    def promote() -> None:
        while not done.is_set():
            with contextlib.suppress(NotFound):
                other.promote("sql", "v2", **ADA)

    with ThreadPoolExecutor(1) as thread:
        promoting = thread.submit(promote)
        try:
            for _ in range(40):
                registry.aliases.put("sql", {"v1": 1, "v2": 1}, **ADA)
                registry.aliases.remove("sql", **ADA)
                assert registry.aliases.get("sql", **MINE) is None
                assert registry.aliases.get("sql", **MINE) is None
        finally:
            done.set()
        promoting.result()


def test_a_heavier_adapter_is_warmed_before_a_later_used_one(registry: Registry) -> None:
    for name, weight in {"a": 1.0, "b": 1.0, "c": 3.5, "d": 0.0}.items():
        add(registry, name, f"digest-{name}", traffic_weight=weight)
    registry.catalog.note_use({f"digest-{name}": -index for index, name in enumerate("dabc")})
    assert [entry.name for entry in registry.catalog.hot(10)] == ["c", "a", "b", "d"]


def test_a_name_is_not_given_to_what_no_engine_could_hold(registry: Registry) -> None:
    catalog = Catalog(registry.database, PinLimits(alone=EngineCapacity(rank=8)))
    with pytest.raises(AdapterTooLarge, match="'a' has rank 9 and an engine holds at most rank 8"):
        register(catalog, "a", "/", "digest", max_rank=9, size_bytes=1, **ADA)
    assert catalog.get("a", **MINE) is None
    register(catalog, "a", "/", "digest", max_rank=8, size_bytes=1, **ADA)


def test_pins_that_do_not_fit_are_refused_with_numbers_and_change_nothing(
    registry: Registry,
) -> None:
    catalog = Catalog(registry.database, PinLimits(rank_rows=40, adapter_slots=3, extra_bytes=100, host_bytes=1000))

    def add_of(name: str, *, rank: int = 8, size: int = 10, extra: int = 0, pinned: bool | None = None) -> None:
        digest = f"digest-{name[0]}"
        register(catalog, name, "/", digest, max_rank=rank, size_bytes=size, extra_bytes=extra, pinned=pinned, **ADA)

    add_of("a", rank=9, extra=60, pinned=True)
    add_of("a-too", rank=9, extra=60, pinned=True)
    for values, words in (
        ({"rank": 17}, "take 48 rank rows and may take 40; unpin another, or raise engine.lora_pool_rows"),
        ({"extra": 41}, "take 101 bytes and may take 100.*engine.extra_weights_bytes or adapters.max_pinned_fraction"),
        ({"size": 991}, "take 1001 bytes of host memory and may take 1000.*adapters.host_cache_bytes"),
    ):
        with pytest.raises(AdapterTooLarge, match=f"'b' cannot be pinned: 2 pinned adapters would {words}"):
            add_of("b", **values, pinned=True)
        assert catalog.get("b", **MINE) is None
    add_of("b")
    add_of("c", pinned=True)
    add_of("d", pinned=True)
    with pytest.raises(AdapterTooLarge, match="4 pinned adapters would take 4 adapter slots and may take 3"):
        catalog.configure("b", pinned=True, **ADA)
    entry = catalog.get("b", **MINE)
    assert entry is not None
    assert not entry.pinned
    catalog.configure("b", traffic_weight=9.0, **ADA)
    catalog.configure("c", pinned=False, **ADA)
    assert catalog.configure("b", pinned=True, **ADA).pinned
    with pytest.raises(AdapterTooLarge, match="'a' cannot be pinned: 4 pinned"):  # as it was, and so with new contents
        register(catalog, "a", "/", "digest-new", max_rank=8, size_bytes=1, **ADA)
    assert sorted(entry.name for entry in catalog.pinned_entries()) == ["a", "a-too", "b", "d"]
    events = [event.event for event in reversed(registry.event_log.events("b", **MINE))]
    assert events == ["registered", "pinned"]
    assert [event.event for event in registry.event_log.events("c", **MINE)] == [
        "unpinned",
        "registered",
    ]


def test_moves_are_told_to_every_name(registry: Registry) -> None:
    for name in ("a", "twin"):
        add(registry, name, "digest-a")
    registry.catalog.note_moves([Move("deleted from disk", "digest-a", 5.0), Move("deleted from disk", "other", 6.0)])
    for name in ("a", "twin"):
        event = registry.event_log.events(name, **MINE)[0]
        assert (event.event, event.time_s, event.digest) == ("deleted from disk", 5.0, "digest-a")
        assert event.replica_id is None


def test_of_many_unloaded_names_the_last_ones_are_told(registry: Registry) -> None:
    """A name per version with the weights of the last one: a move must not be an event of each."""
    names = [f"v{number}" for number in range(MAX_UNLOADED_NAMES + 2)]
    for name in names:
        add(registry, name, "digest-a")
        registry.catalog.finish_unload(registry.catalog.begin_unload(name, **ADA).job)
    add(registry, "present", "digest-a")
    registry.catalog.note_residency("r1", [], ["digest-a"])
    last = {name: registry.event_log.events(name, **MINE)[0].event for name in [*names, "present"]}
    told = [name for name, event in last.items() if event == "unloaded from device"]
    assert told == [*names[2:], "present"]


def test_an_unloaded_name_hears_only_that_its_last_contents_leave(registry: Registry) -> None:
    """Other names have the same contents: after a restart the unloaded one had been loaded to a device."""
    for name in ("a", "twin"):
        add(registry, name, "digest-a")
    _, leaving, _ = registry.catalog.begin_unload("a", **ADA)
    registry.catalog.finish_unload(leaving)
    registry.catalog.note_residency("r1", ["digest-a"], [])
    registry.catalog.note_moves([Move("fetched again", "digest-a", 5.0)])
    heard = {name: [event.event for event in registry.event_log.events(name, **MINE)] for name in ("a", "twin")}
    assert heard["twin"][:2] == ["fetched again", "loaded to device"]
    assert heard["a"][0] == "removed"
    registry.catalog.note_residency("r1", [], ["digest-a"])
    assert registry.event_log.events("a", **MINE)[0].event == "unloaded from device"
