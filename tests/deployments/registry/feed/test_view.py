"""An ingress' copy: equal to the registry, in order, and fair to the weights of aliases."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.registry.feed.view import MAX_REPLACED, Entry, RegistryView, choose_target
from app.deployments.registry.models import DEFAULT_TENANT, AliasEntry, AliasTarget, CatalogEntry
from app.deployments.rpc.long_poll_host import Changes
from app.engine.adapters.card import AdapterRef
from tests.budgets import examples
from tests.deployments.managed import MINE

BOTH = (CatalogEntry, AliasEntry)


def adapter(name: str, tenant_id: str = "default") -> CatalogEntry:
    return CatalogEntry(AdapterRef(name, f"digest-{name}", tenant_id), 8, 64, 0.0, "ada")


def alias(name: str, tenant_id: str = "default", **targets: float) -> AliasEntry:
    shares = tuple(AliasTarget(target, weight) for target, weight in targets.items())
    return AliasEntry(name, shares, 1, 0.0, tenant_id=tenant_id)


names = st.text("abc", min_size=1, max_size=3)
changes = st.tuples(st.sampled_from(["default", "bob"]), names, st.sampled_from(["adapter", "alias", "gone"]))


@given(batches=st.lists(st.lists(changes, max_size=200), max_size=5), limit=st.integers(1, 9))
@settings(max_examples=examples(60), deadline=None)
def test_pages_list_everything_once_in_order(batches: list[list[tuple[str, str, str]]], limit: int) -> None:
    view = RegistryView()
    expected: dict[tuple[str, str], Entry] = {}
    for batch in batches:
        rows: list[tuple[tuple[str, str], Entry | None]] = []
        for tenant_id, name, kind in batch:
            entry = {"adapter": adapter(name, tenant_id), "alias": alias(name, tenant_id, x=1), "gone": None}[kind]
            rows.append(((tenant_id, name), entry))
            expected.pop((tenant_id, name), None)
            if entry is not None:
                expected[tenant_id, name] = entry
        view.apply(rows)
    for tenant_id in ("default", "bob"):
        for kinds in (BOTH, (CatalogEntry,), (AliasEntry,)):
            seen: list[Entry] = []
            after, has_more = None, True
            while has_more:
                entries, has_more = view.page(kinds, limit=limit, after=after, tenant_id=tenant_id)
                assert len(entries) == limit or not has_more
                seen += entries
                after = seen[-1].name if seen else None
            wanted = [e for (tenant, _), e in sorted(expected.items()) if tenant == tenant_id and isinstance(e, kinds)]
            assert seen == wanted
    assert view.num_adapters == sum(isinstance(entry, CatalogEntry) for entry in expected.values())
    view.take(Changes(((("default", "z"), adapter("z")),), is_first=True, is_last=True))
    assert [entry.name for entry in view.page(BOTH, limit=9, **MINE).entries] == ["z"]
    assert view.find("a", "bob") is None


def test_names_are_there_while_a_new_copy_of_the_registry_comes() -> None:
    def row(name: str, found: Entry | None = None) -> tuple[tuple[str, str], Entry | None]:
        return ("default", name), found or adapter(name)

    view = RegistryView([adapter("a"), adapter("b"), adapter("left"), alias("was", a=1)])
    view.take(Changes((row("a"), row("new")), is_first=True, is_last=False))  # the first page after a restart
    assert all(view.resolve(name, "k", DEFAULT_TENANT) is not None for name in ("a", "b", "left", "was", "new"))
    view.take(Changes((row("b", alias("b", a=1)), row("a"), (("default", "new"), None)), False, is_last=False))
    assert isinstance(view.find("b", DEFAULT_TENANT), AliasEntry)
    assert view.find("new", DEFAULT_TENANT) is None
    view.take(Changes((row("c"),), is_first=True, is_last=False))  # and another, before the copy was complete
    assert [entry.name for entry in view.page(BOTH, limit=9, **MINE).entries] == [
        "a",
        "b",
        "c",
        "left",
        "was",
    ]
    view.take(Changes((row("b"),), is_first=False, is_last=True))
    assert [entry.name for entry in view.page(BOTH, limit=9, **MINE).entries] == ["b", "c"]
    assert view.num_adapters == 2
    view.take(Changes((row("d"),), is_first=False, is_last=True))
    assert [entry.name for entry in view.page(BOTH, limit=9, **MINE).entries] == ["b", "c", "d"], (
        "later changes are only that"
    )


def test_names_mean_adapters_and_aliases_mean_their_targets() -> None:
    view = RegistryView([adapter("v1"), adapter("v2"), alias("sql", v2=1), alias("broken", v9=1), adapter("v1", "bob")])
    assert view.resolve("v1", "key", DEFAULT_TENANT) == adapter("v1").ref
    assert view.resolve("sql", "key", DEFAULT_TENANT) == adapter("v2").ref
    assert view.resolve("v1", "key", "bob") == adapter("v1", "bob").ref
    for name, tenant_id in (("v2", "bob"), ("sql", "bob"), ("absent", "default"), ("broken", "default")):
        assert view.resolve(name, "key", tenant_id) is None
    assert view.adapter("sql", DEFAULT_TENANT) is None


def test_a_canary_is_sticky_and_gets_its_share() -> None:
    users = [f"user {index}" for index in range(8000)]

    def choices(**targets: float) -> dict[str, str]:
        return {user: choose_target(alias("sql", **targets), user) for user in users}

    five, ten = choices(v1=95, v2=5), choices(v1=90, v2=10)
    share = Counter(five.values())["v2"] / len(users)
    assert 0.04 < share < 0.06, "four standard deviations"
    assert five == choices(v2=5, v1=95), "neither time nor order matters"
    canary = {user for user in users if five[user] == "v2"}
    assert all(ten[user] == "v2" for user in canary), "raising the share moves nobody back"
    three = choices(v1=90, v2=5, v3=5)
    moved = [user for user in users if three[user] != five[user]]
    assert moved
    assert all(three[user] == "v3" or five[user] == "v1" for user in moved), "only towards what has gained"
    assert set(choices(v1=1).values()) == {"v1"}
    other = Counter(choose_target(alias("other", v1=95, v2=5), user) for user in canary)
    assert other["v2"] < len(canary) / 2, "another alias tries other users"


def test_what_a_name_meant_until_recently_is_found_by_its_reference() -> None:
    def entry(number: int, text: str = "") -> CatalogEntry:
        ref = AdapterRef("a", f"digest-{number}", DEFAULT_TENANT, number)
        return replace(adapter("a"), ref=ref, text=text or f"text {number}")

    view = RegistryView([entry(0)])
    view.apply([(("default", "a"), entry(0, "changed"))])
    for number in range(1, MAX_REPLACED + 2):
        view.apply([(("default", "a"), entry(number))])
    view.apply([(("default", "a"), None)])
    assert view.find("a", DEFAULT_TENANT) is None
    found = [view.entry_of(entry(number).ref) for number in range(MAX_REPLACED + 2)]
    assert found[:2] == [None, None], "the oldest"
    assert found[2:] == [entry(number) for number in range(2, MAX_REPLACED + 2)]
    assert view.entry_of(replace(entry(5).ref, tenant_id="bob")) is None
