"""Rank rows: runs never overlap, pins hold, room is found whenever there is some."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.config import EvictionPolicy
from app.engine.errors import AdapterTooLarge, NotReady
from app.engine.pools.adapter_pool import AdapterGrant, AdapterPool
from tests.budgets import examples

POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "cost")


def rows_for(rank: int, alignment: int) -> int:
    rows = alignment
    while rows < rank:
        rows *= 2
    return rows


def must_succeed(pool: AdapterPool, rank: int, pinned: frozenset[str]) -> bool:
    """By brute force: some aligned window holds no referenced or pinned row, and a slot is free or idle.

    If pinned ones lie in every window and would fit beside it: one that holds shorter adapters without references.
    """
    rows = rows_for(rank, pool.limits.rank_alignment)
    total = pool.limits.num_rows
    residents = pool.residents()
    stays = [(r.row_start, r.row_start + r.num_rows) for r in residents if r.num_refs or r.digest in pinned]
    if len(stays) == pool.limits.max_loras - 1:
        return False
    starts = range(0, total - rows + 1, rows)
    if any(all(end <= start or start + rows <= first for first, end in stays) for start in starts):
        return True
    within = [
        [r for r in residents if start < r.row_start + r.num_rows and r.row_start < start + rows] for start in starts
    ]
    num_pinned = sum(r.num_rows for r in residents if r.digest in pinned)
    is_everywhere = all(any(r.digest in pinned for r in each) for each in within)
    idle = any(all(r.num_refs == 0 and r.num_rows < rows for r in each) for each in within)
    return is_everywhere and num_pinned + rows <= total and idle


@settings(max_examples=examples(200), deadline=None)
@given(
    rows=st.integers(0, 100),
    alignment=st.sampled_from([1, 8, 16]),
    slots=st.integers(1, 7),
    policy=st.sampled_from(POLICIES),
    data=st.data(),
)
def test_every_row_slot_and_reference_is_accounted_for(
    rows: int, alignment: int, slots: int, policy: EvictionPolicy, data: st.DataObject
) -> None:
    pool = AdapterPool(rows, alignment, slots, policy=policy)
    refs: dict[str, int] = {}
    where: dict[str, AdapterGrant] = {}
    pinned: frozenset[str] = frozenset()
    for _ in range(data.draw(st.integers(1, 40))):
        rank = data.draw(st.integers(1, 40))
        digest = f"{data.draw(st.integers(0, 3))}/{rank}"
        action = data.draw(st.sampled_from(["acquire"] * 3 + ["release", "unload", "pin"]))
        if action == "pin":
            pinned = data.draw(st.frozensets(st.sampled_from([digest, *sorted(where)]), max_size=3))
            pool.pin(pinned)
        elif action == "release" and any(refs.values()):
            digest = data.draw(st.sampled_from(sorted(d for d, n in refs.items() if n)))
            pool.release(digest)
            refs[digest] -= 1
        elif action == "unload" and where:
            digest = data.draw(st.sampled_from(sorted(where)))
            before = pool.num_rows_free
            freed = pool.unload(digest)
            assert freed == (0 if refs.get(digest) else where[digest].num_rows)
            assert pool.num_rows_free == before + freed
            if freed:
                del where[digest]
        elif action == "acquire" and rank > pool.limits.max_rank:
            with pytest.raises(AdapterTooLarge, match=f"needs {rank} rank rows "):
                pool.acquire(digest, rank)
        elif action == "acquire":
            expected = digest in where or must_succeed(pool, rank, pinned)
            grant = pool.acquire(digest, rank, size_bytes=data.draw(st.integers(0, 1000)))
            assert (grant is not None) == expected
            if grant is None:
                if not any(refs.values()):  # nothing will leave by itself
                    with pytest.raises(NotReady, match="pinned adapters leave no room for this adapter"):
                        pool.check_room(digest, rank)
                continue
            pool.check_room(digest, rank)
            for gone in grant.evicted:
                assert not refs.get(gone)
                assert gone not in pinned or where[gone].num_rows < rows_for(rank, alignment)
                del where[gone]
            assert grant.needs_write == (digest not in where)
            if digest in where:
                assert grant[:3] == where[digest][:3], "a resident adapter is never moved"
            assert grant.adapter_slot not in {0, *(g.adapter_slot for d, g in where.items() if d != digest)}
            assert grant.num_rows == rows_for(rank, alignment)
            where[digest] = grant
            refs[digest] = refs.get(digest, 0) + 1
        pool.check()
        assert {r.digest: (r.row_start, r.num_refs) for r in pool.residents()} == {
            d: (g.row_start, refs.get(d, 0)) for d, g in where.items()
        }


def test_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    pool = AdapterPool(32, 8, 8)
    for digest in ("a", "b", "c", "d"):
        pool.acquire(digest, 8)
        pool.release(digest)
    pool.acquire("a", 8)
    pool.release("a")
    grant = pool.acquire("e", 8)
    assert grant is not None
    assert grant.evicted == ("b",)


@settings(max_examples=examples(100), deadline=None)
@given(policy=st.sampled_from(POLICIES), wanted=st.lists(st.integers(0, 9), max_size=80), data=st.data())
def test_each_policy_gives_up_what_it_says(policy: EvictionPolicy, wanted: list[int], data: st.DataObject) -> None:
    """Ten adapters of one rank and of different bytes, room for three, beside the policies' formulas."""
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=10, max_size=10))
    busy = data.draw(st.integers(0, 9))
    pool = AdapterPool(32, 8, 16, policy=policy)
    assert pool.acquire(str(busy), 8, 0, sizes[busy]) is not None
    held: dict[int, tuple[int, float, int]] = {}  # uses, value, last used
    age = 0.0
    for now, index in enumerate(wanted):
        if index == busy:
            continue
        evicted = ()
        if index not in held and len(held) == 3:
            gone = min(held, key=lambda i: held[i][1:])
            age = max(age, held.pop(gone)[1])
            evicted = (str(gone),)
        uses = held[index][0] + 1 if index in held else 1
        held[index] = (uses, {"lru": 0.0, "lfu": age + uses, "cost": age + uses * sizes[index]}[policy], now)
        grant = pool.acquire(str(index), 8, 0, sizes[index])
        assert grant is not None
        assert grant.evicted == evicted
        pool.release(str(index))
    assert {int(resident.digest) for resident in pool.residents()} == {*held, busy}


def test_lfu_keeps_what_is_used_often_but_not_for_ever() -> None:
    pool = AdapterPool(32, 8, 8, policy="lfu")

    def use(digest: str) -> tuple[str, ...]:
        grant = pool.acquire(digest, 8)
        assert grant is not None
        pool.release(digest)
        return grant.evicted

    for _ in range(20):
        use("often")
    assert not any("often" in use(f"once {number}") for number in range(20))
    assert any("often" in use(f"later {number}") for number in range(100)), "its popularity is long past"


def test_cost_counts_the_rows_that_an_adapter_holds() -> None:
    """Of as many bytes to write again, the one that takes up twice the rows goes first."""
    pool = AdapterPool(64, 8, 3, policy="cost")
    for digest, rank in (("wide", 16), ("narrow", 8)):
        pool.acquire(digest, rank, 0, 1000)
        pool.release(digest)
    for _ in range(3):
        pool.acquire("narrow", 8, 0, 1000)
        pool.release("narrow")
    grant = pool.acquire("new", 8, 0, 1000)
    assert grant is not None
    assert grant.evicted == ("wide",)
    pool = AdapterPool(64, 8, 3, policy="cost")
    for digest, rank in (("narrow", 8), ("wide", 16)):
        pool.acquire(digest, rank, 0, 1000)
        pool.release(digest)
    grant = pool.acquire("new", 8, 0, 1000)
    assert grant is not None
    assert grant.evicted == ("wide",), "though it was used last"


def test_small_adapters_keep_large_runs_whole() -> None:
    pool = AdapterPool(64, 8, 16)
    for index in range(4):
        assert pool.acquire(f"small {index}", 8) is not None
    large = pool.acquire("large", 32)
    assert large is not None
    assert large.evicted == ()
    assert large.row_start == 32


def test_idle_neighbours_make_room_for_a_large_run_around_one_in_use() -> None:
    pool = AdapterPool(64, 8, 16)
    for index in range(8):
        pool.acquire(f"{index}", 8)
    for index in (0, 1, 2, 4, 5, 6, 7):
        pool.release(f"{index}")
    grant = pool.acquire("large", 32)
    assert grant is not None
    assert sorted(grant.evicted) == ["4", "5", "6", "7"]
    assert pool.acquire("larger", 33) is None


def test_slots_run_out_before_rows() -> None:
    pool = AdapterPool(64, 8, 3)
    for digest in ("a", "b"):
        pool.acquire(digest, 8)
    assert pool.acquire("c", 8) is None
    pool.release("b")
    grant = pool.acquire("c", 8)
    assert grant is not None
    assert grant.evicted == ("b",)


@pytest.mark.parametrize("seed", range(20))
def test_a_reservation_is_met_once_the_pins_of_its_window_have_left(seed: int) -> None:
    """Holders that always renew their references elsewhere cannot keep the reserved window from emptying."""
    rng = random.Random(seed)
    pool = AdapterPool(64, 8, rng.choice([4, 16]))
    pins: list[str] = []
    names = [(f"n{i}", rng.choice([4, 8, 16])) for i in range(12)]

    def churn() -> None:
        for _ in range(4):
            name, rank = rng.choice(names)
            if pool.acquire(name, rank) is not None:
                pins.append(name)
        pool.check()

    for _ in range(10):
        churn()
    rank = rng.choice([16, 32, 64])
    granted = pool.acquire("patient", rank)
    pool.reserve("patient", rank)
    num_left = len(pins)
    for _ in range(num_left):  # the references there were end, oldest first, while new ones keep coming
        if granted is not None:
            break
        pool.release(pins.pop(0))
        churn()
        granted = pool.acquire("patient", rank)
    assert granted is not None
    assert pool.reserved_for is None


def test_only_the_holder_ends_a_reservation() -> None:
    pool = AdapterPool(16, 8, 4)
    pool.acquire("busy", 16)
    pool.reserve("first", 16)
    pool.reserve("second", 8)
    assert pool.reserved_for == "first"
    pool.release("busy")
    assert pool.acquire("busy", 16) is None
    assert pool.acquire("second", 8) is None
    pool.cancel_reservation("second")
    assert pool.reserved_for == "first"
    pool.cancel_reservation("first")
    assert pool.acquire("second", 8) is not None


def test_the_last_slot_is_kept_for_the_holder_of_a_reservation() -> None:
    pool = AdapterPool(64, 8, 3)
    pool.acquire("busy", 8)
    pool.acquire("idle", 8)
    pool.release("idle")
    pool.reserve("patient", 32)
    assert pool.acquire("idle", 8) is None
    assert pool.acquire("new", 8) is None
    assert pool.acquire("busy", 8) is not None
    grant = pool.acquire("patient", 32)
    assert grant is not None
    assert grant.evicted == ("idle",)


def test_a_pool_without_rows_or_slots_says_so() -> None:
    for pool in (AdapterPool(0, 8, 4), AdapterPool(64, 8, 1), AdapterPool(7, 8, 4)):
        with pytest.raises(AdapterTooLarge, match="raise engine"):
            pool.limits.check_rows("acme/legal", 8)


@settings(max_examples=examples(100), deadline=None)
@given(max_extra_bytes=st.integers(0, 60), slots=st.integers(2, 7), data=st.data())
def test_extras_never_exceed_their_bytes_and_are_released_once(
    max_extra_bytes: int, slots: int, data: st.DataObject
) -> None:
    pool = AdapterPool(1024, 8, slots, max_extra_bytes)
    pins: dict[str, int] = {}
    held: dict[int, str] = {}  # adapter slot -> digest, as a backend that obeys would have it
    for _ in range(data.draw(st.integers(1, 40))):
        size = data.draw(st.sampled_from([0, 0, 7, 20, 45]))
        digest = f"{data.draw(st.integers(0, 3))}/{size}"
        action = data.draw(st.sampled_from(["acquire"] * 3 + ["release", "unload"]))
        if action == "release" and any(pins.values()):
            digest = data.draw(st.sampled_from(sorted(d for d, n in pins.items() if n)))
            pool.release(digest)
            pins[digest] -= 1
        elif action == "unload":
            pool.unload(digest)
        elif action == "acquire" and size > max_extra_bytes:
            with pytest.raises(AdapterTooLarge, match=f"has {size} bytes.*most {max_extra_bytes}.*raise engine"):
                pool.acquire(digest, 8, size)
        elif action == "acquire":
            others = [d for d, n in pins.items() if n and d != digest]
            fits = sum(int(d.split("/")[1]) for d in others) + size <= max_extra_bytes or size == 0
            grant = pool.acquire(digest, 8, size)
            assert (grant is not None) == (pins.get(digest, 0) > 0 or (fits and len(others) < slots - 1))
            if grant is not None:
                pins[digest] = pins.get(digest, 0) + 1
                for adapter_slot in pool.take_pending_free():
                    assert not pins.get(held.pop(adapter_slot), 0)
                if size and grant.needs_write:
                    assert grant.adapter_slot not in held
                    held[grant.adapter_slot] = digest
        for adapter_slot in pool.take_pending_free():
            del held[adapter_slot]
        pool.check()
        assert sorted(held.values()) == sorted(r.digest for r in pool.residents() if not r.digest.endswith("/0"))
        assert pool.extra_bytes == sum(int(d.split("/")[1]) for d in held.values()) <= max_extra_bytes


def test_bytes_are_kept_for_the_holder_of_a_reservation() -> None:
    pool = AdapterPool(1024, 8, 16, 100)
    for digest in ("a", "b"):
        assert pool.acquire(digest, 8, 40) is not None
    assert pool.acquire("patient", 8, 80) is None
    pool.reserve("patient", 8, 80)
    pool.release("b")
    assert pool.acquire("b", 8, 40) is None, "an idle one cannot come back before the holder"
    assert pool.acquire("a", 8, 40) is None, "nor can a reference be renewed"
    assert pool.acquire("small", 8, 10) is None
    assert pool.acquire("plain", 8) is not None
    pool.release("a")
    grant = pool.acquire("patient", 8, 80)
    assert grant is not None
    assert grant.evicted == ("b", "a")
    assert pool.reserved_for is None


def test_what_is_pinned_lies_together_and_is_never_evicted() -> None:
    pool = AdapterPool(64, 8, 16)
    for index in range(8):
        pool.acquire(f"{index}", 8)
        pool.release(f"{index}")
    pool.pin(["x", "y", "z"])
    grants = [pool.acquire(digest, 8) for digest in ("x", "y", "z")]
    assert [grant and grant.row_start for grant in grants] == [0, 8, 16]
    for digest in ("x", "y", "z"):
        pool.release(digest)
    large = pool.acquire("large", 32)
    assert large is not None, "half of the table has no pinned row"
    assert large.row_start == 32
    pool.release("large")
    with pytest.raises(NotReady, match=r"64 rank rows: 24 of 64.*lora_pool_rows, or unpin"):
        pool.check_room("larger", 33)
    assert pool.acquire("larger", 33) is None
    pool.pin([])
    pool.check_room("larger", 33)
    assert pool.acquire("larger", 33) is not None


def with_pinned_in_both_halves() -> AdapterPool:
    """512 rows full of idle adapters of rank 16, those in rows 48 and 320 pinned there."""
    pool = AdapterPool(512, 8, 64)
    for index in range(32):
        pool.acquire(f"{index}", 16)
        pool.release(f"{index}")
    pool.pin(["3", "20"])
    return pool


def test_pinned_adapters_in_the_way_of_a_long_run_return_beside_the_others() -> None:
    pool = with_pinned_in_both_halves()
    with pytest.raises(NotReady, match="512 rank rows: 32 of 512"):
        pool.check_room("whole", 512)
    pool.check_room("large", 256)
    large = pool.acquire("large", 256)
    assert large is not None
    assert large.row_start == 256
    assert "20" in large.evicted
    again = pool.acquire("20", 16)
    assert again is not None
    assert again.row_start == 0
    for digest in ("large", "20"):
        pool.release(digest)
    other = pool.acquire("other", 256)
    assert other is not None
    assert other.evicted == ("large",), "the pinned ones lie together"
    pool.check()


def test_pinned_adapters_in_use_delay_a_long_run_and_no_longer_than_that() -> None:
    pool = with_pinned_in_both_halves()
    for digest in ("3", "20", "30"):
        pool.acquire(digest, 16)
    pool.check_room("large", 256)
    assert pool.acquire("large", 256) is None
    pool.reserve("large", 256)
    assert pool.acquire("3", 16) is None, "the references in the way can only end"
    assert pool.acquire("20", 16) is not None
    pool.release("3")
    large = pool.acquire("large", 256)
    assert large is not None
    assert large.row_start == 0, "where fewer were in use"
    assert pool.acquire("3", 16) is not None, "it finds another place at once"
    pool.check()


def test_pinning_an_adapter_ends_a_reservation_in_its_way() -> None:
    pool = AdapterPool(32, 8, 8, 100)
    pool.acquire("pinned", 8, 60)
    pool.reserve("patient", 32)
    assert pool.reserved_for == "patient"
    pool.pin(["pinned"])
    assert pool.reserved_for is None
    pool.reserve("patient", 32)
    assert pool.reserved_for is None, "there is no window to wait for"
    with pytest.raises(NotReady, match=r"50 bytes: 60 of 100.*extra_weights_bytes"):
        pool.check_room("heavy", 8, 50)
    assert pool.acquire("heavy", 8, 50) is None
    assert pool.acquire("pinned", 8, 60) is not None


def test_slots_of_pinned_adapters_stay_theirs() -> None:
    pool = AdapterPool(64, 8, 3)
    pool.pin(["a", "b"])
    for digest in ("a", "b"):
        pool.acquire(digest, 8)
        pool.release(digest)
    assert pool.acquire("c", 8) is None
    with pytest.raises(NotReady, match=r"slot: all 2"):
        pool.check_room("c", 8)
    assert pool.unload("a") == 8
    assert pool.acquire("c", 8) is not None


def use(pool: AdapterPool, tenant: str, name: str, rank: int = 8) -> AdapterGrant | None:
    """Reference an adapter and let it go."""
    grant = pool.acquire(name, rank, tenant_id=tenant)
    if grant is not None:
        pool.release(name)
    return grant


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_s_thousand_adapters_evict_another_s_one(policy: EvictionPolicy) -> None:
    pool = AdapterPool(64, 8, 64, policy=policy)
    use(pool, "one", "the one")
    for index in range(1000):
        assert use(pool, "many", f"{index}") is not None
        assert pool.is_resident("the one")
    assert pool.num_rows_free == 0, "what no other tenant needs is theirs"


def test_who_has_more_than_its_share_waits_for_its_own_rows_while_anything_runs() -> None:
    pool = AdapterPool(64, 8, 64)
    use(pool, "one", "the one")
    for index in range(7):
        assert pool.acquire(f"{index}", 8, tenant_id="many") is not None
    assert pool.acquire("7", 8, tenant_id="many") is None
    pool.release("3")
    assert use(pool, "one", "mine too") is not None, "within its share it takes what is idle"
    grant = pool.acquire("7", 8, tenant_id="many")
    assert grant is not None
    assert grant.evicted == ("3",)
    pool.reserve("urgent", 8)
    held = pool.reserved_for
    assert held == "urgent"
    assert pool.acquire("urgent", 8, tenant_id="many") is not None, "who has waited too long takes what it was given"


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), slots=st.integers(2, 12))
def test_what_a_tenant_within_its_share_uses_stays_unless_nothing_else_can_go(data: st.DataObject, slots: int) -> None:
    pool = AdapterPool(64, 8, slots)
    users: dict[str, str] = {}
    held: list[str] = []
    for index in range(data.draw(st.integers(1, 60))):
        if held and data.draw(st.booleans()):
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        tenant = data.draw(st.sampled_from("abc"))
        rank = data.draw(st.sampled_from([8, 16, 32]))
        name = f"{tenant}{data.draw(st.integers(0, 3))}/{rank}"
        before = {item.digest: item for item in pool.residents()}
        tenants = {users[digest] for digest in before} | {tenant}
        rows = {each: sum(r.num_rows for d, r in before.items() if users[d] == each) for each in tenants}
        is_free = not any(item.num_refs for item in before.values())
        grant = pool.acquire(name, rank, tenant_id=tenant)
        pool.check()
        if grant is None:
            assert held, "with nothing in use there is always room"
            continue
        users[name] = tenant
        held.append(name)
        share = 64 / len(tenants)
        is_over = rows[tenant] + rank > share and len(before) - len(grant.evicted) + 1 < slots - 1
        if is_over and not is_free:
            for digest in grant.evicted:
                assert users[digest] == tenant or rows[users[digest]] > share, index
