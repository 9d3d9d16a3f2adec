"""The host cache: one read however many ask, memory that is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterator

import pytest

from app.deployments.registry.jobs.failure_backoff import FIRST_S, FailureBackoff
from app.deployments.store import reader_pool as reads_module
from app.deployments.store.adapter_reader import LocatedAdapter
from app.deployments.store.host_cache import HostAdapterCache
from app.deployments.store.reader_pool import ABANDON_S, MAX_READERS, MAX_READERS_PER_HOST, MAX_READERS_PER_LANE
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.sandbox.packing import PackedAdapter, pack_adapter
from app.engine.adapters.signing.trusted_keys import TrustedKeys
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterQuarantined, AdapterTooLarge, FetchAbandoned
from tests.deployments.store.recorded_events import RecordedEvents
from tests.fakes import fake_adapter


class Sources:
    """Where adapters come from: a dictionary, and a gate for slow ones."""

    def __init__(self) -> None:
        self.contents: dict[str, LoraAdapter] = {}
        self.reads: list[str] = []
        self.puts: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.versions: dict[str, str] = {}
        self.num_asked = self.num_closed = 0
        self.abandoned: list[str] = []

    def lane(self, source: str) -> str:
        return source[:1]

    def host(self, source: str) -> str:
        return self.lane(source)

    def abandon(self, source: str) -> None:
        if gate := self.gates.pop(source, None):
            self.abandoned.append(source)
            gate.set()

    def close(self) -> None:
        self.num_closed += 1

    def version(self, source: str, tenant_id: str) -> str:  # noqa: ARG002
        self.num_asked += 1
        return self.versions.get(source, "")

    def from_disk(self, digest: str, source: str) -> PackedAdapter | None:  # noqa: ARG002
        return None

    def pin(self, digests: Collection[str]) -> None:
        self.pinned = set(digests)

    def from_source(self, source: str, tenant_id: str) -> LocatedAdapter:  # noqa: ARG002
        self.reads.append(source)
        adapter = self.contents.get(source)  # what is there when reading begins
        if gate := self.gates.get(source):
            assert gate.wait(600)
        if source in self.abandoned:
            raise FetchAbandoned(f"{source} was abandoned")
        if adapter is None:
            raise AdapterFormatError(f"{source} is broken")
        uri = f"/canonical/{source}" if "/" not in source else source
        return LocatedAdapter(uri, pack_adapter(adapter))

    def put(self, packed: PackedAdapter) -> str:
        self.puts.append(packed.card.digest)
        return f"handle-{packed.card.digest}"


@pytest.fixture
def sources() -> Sources:
    return Sources()


@pytest.fixture
def told() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture
def store(sources: Sources, told: RecordedEvents) -> Iterator[HostAdapterCache[str]]:
    store = HostAdapterCache(sources, sources.put, told, max_bytes=100)
    yield store
    store.close()


def of_one_tenant(num_reads: int) -> int:
    """How many of a lane's, host's or all reads one tenant may have at a time."""
    return 3 * num_reads // 4


async def load(store: HostAdapterCache[str], name: str) -> AdapterRef:
    """Read it and give it a name, as the registry does."""
    uri, card = await store.load(name, "default")
    return AdapterRef(name, card.digest, "t", uri=uri)


def add(sources: Sources, name: str, *, size: int = 40, as_name: str | None = None) -> LoraAdapter:
    adapter = fake_adapter(as_name or name, 8, size_bytes=size)
    sources.contents[name] = sources.contents[f"/canonical/{name}"] = adapter
    return adapter


async def test_simultaneous_first_requests_read_once(store: HostAdapterCache[str], sources: Sources) -> None:
    adapter = add(sources, "a")
    sources.gates["a"] = threading.Event()
    tasks = [asyncio.create_task(load(store, "a")) for _ in range(20)]
    while not sources.reads:
        await asyncio.sleep(0.001)
    tasks[3].cancel()
    sources.gates["a"].set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    entries = [result for result in results if not isinstance(result, BaseException)]
    assert len(entries) == 19
    assert sources.reads == ["a"]
    assert sources.puts == [adapter.card.digest]
    handles = await asyncio.gather(*(store.fetch(entries[0]) for _ in range(10)))
    assert set(handles) == {f"handle-{adapter.card.digest}"}
    assert sources.reads == ["a"]


async def test_slow_sources_delay_only_their_own_lane(store: HostAdapterCache[str], sources: Sources) -> None:
    """Nine that hang, in one lane of four; another lane does not wait for them."""
    gate = threading.Event()
    for index in range(9):
        add(sources, f"slow{index}", size=10)
        sources.gates[f"slow{index}"] = gate
    add(sources, "fast", size=10)
    slow = [asyncio.create_task(load(store, f"slow{index}")) for index in range(9)]
    while len(sources.reads) < of_one_tenant(MAX_READERS_PER_LANE):
        await asyncio.sleep(0.001)
    entry = await load(store, "fast")
    store.invalidate(entry.digest)
    await store.fetch(entry)
    assert not any(task.done() for task in slow)
    assert len(sources.reads) == of_one_tenant(MAX_READERS_PER_LANE) + 2
    gate.set()
    await asyncio.gather(*slow)


async def test_what_is_near_never_waits_for_what_is_far(
    store: HostAdapterCache[str], sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More hanging sources than there are threads for them."""
    monkeypatch.setattr(sources, "lane", lambda source: "local" if "near" in source else source)
    gate = threading.Event()
    names = [f"far{index}" for index in range(MAX_READERS + 3)]
    for name in names:
        add(sources, name, size=1)
        sources.gates[name] = gate
    add(sources, "near", size=10)
    far = [asyncio.create_task(load(store, name)) for name in names]
    while len(sources.reads) < of_one_tenant(MAX_READERS):
        await asyncio.sleep(0.001)
    ref = await load(store, "near")
    store.invalidate(ref.digest)
    await store.fetch(ref)
    assert not any(task.done() for task in far)
    gate.set()
    await asyncio.gather(*far)


async def test_whoever_registers_after_an_overwrite_gets_the_new_contents(
    store: HostAdapterCache[str], sources: Sources
) -> None:
    """Even while the old contents are still being read for somebody else."""
    old = add(sources, "a", as_name="old")
    sources.gates["a"] = threading.Event()
    first = asyncio.create_task(load(store, "a"))
    while not sources.reads:
        await asyncio.sleep(0.001)
    old_gate = sources.gates.pop("a")
    sources.versions["a"] = "2"
    new = add(sources, "a", as_name="new")
    second = await load(store, "a")
    assert second.digest == new.card.digest
    old_gate.set()
    assert (await first).digest == old.card.digest


async def test_whoever_registers_what_has_no_version_gets_what_is_there_then(
    store: HostAdapterCache[str], sources: Sources
) -> None:
    """A remote source, uploaded anew while its old contents are being read: one more read serves all who ask now."""
    old = add(sources, "a", as_name="old")
    gate = sources.gates["a"] = threading.Event()
    first = asyncio.create_task(load(store, "a"))
    while not sources.reads:
        await asyncio.sleep(0.001)
    new = add(sources, "a", as_name="new")
    later = [asyncio.create_task(load(store, "a")) for _ in range(5)]
    while sources.num_asked < 6:
        await asyncio.sleep(0.001)
    gate.set()
    assert (await first).digest == old.card.digest
    assert {ref.digest for ref in await asyncio.gather(*later)} == {new.card.digest}
    assert sources.reads == ["a", "a"]


async def test_memory_is_bounded_and_evicted_adapters_are_read_again(
    store: HostAdapterCache[str], sources: Sources
) -> None:
    refs = []
    for name in "abc":
        add(sources, name)
        refs.append(await load(store, name))
    assert store._cache.total_bytes <= 100
    assert refs[0].digest not in store.cached_digests
    await store.fetch(refs[0])
    assert sources.reads[-1] == "/canonical/a"
    assert store._cache.total_bytes <= 100
    assert refs[1].digest not in store.cached_digests, "the least recently used went"
    add(sources, "huge", size=101)
    with pytest.raises(AdapterTooLarge, match=r"101 bytes.*100"):
        await load(store, "huge")


async def test_contents_that_changed_behind_the_name_are_refused(
    store: HostAdapterCache[str], sources: Sources
) -> None:
    add(sources, "a")
    first = await load(store, "a")
    store.invalidate(first.digest)
    add(sources, "a", as_name="other")
    with pytest.raises(AdapterMismatch, match="register it again"):
        await store.fetch(first)
    second = await load(store, "a")
    assert second.digest != first.digest


async def test_equal_contents_are_kept_once(store: HostAdapterCache[str], sources: Sources) -> None:
    add(sources, "a", as_name="same")
    add(sources, "b", as_name="same")
    one, two = await store.load("a", "default"), await store.load("b", "default")
    assert one.card.digest == two.card.digest
    assert (one.uri, two.uri) == ("/canonical/a", "/canonical/b")
    assert len(sources.puts) == 1
    store.invalidate(one.card.digest)
    assert store._cache.total_bytes == 0
    with pytest.raises(AdapterFormatError):
        await store.load("broken", "default")


async def test_a_failing_adapter_is_read_once_until_its_time_has_come(sources: Sources) -> None:
    now_s = [0.0]
    backoff = FailureBackoff(lambda: now_s[0])
    store = HostAdapterCache(sources, sources.put, RecordedEvents(), max_bytes=100, backoff=backoff)
    add(sources, "a")
    ref = await load(store, "a")
    store.invalidate(ref.digest)
    del sources.contents["/canonical/a"]
    sources.reads.clear()
    errors = await asyncio.gather(*(store.fetch(ref) for _ in range(20)), return_exceptions=True)
    assert {type(error) for error in errors} == {AdapterFormatError}
    for _ in range(20):
        with pytest.raises(AdapterQuarantined, match=r"adapter 'a' failed to load: /canonical/a is broken; .*5 s"):
            await store.fetch(ref)
    assert sources.reads == ["/canonical/a"]
    now_s[0] += FIRST_S
    with pytest.raises(AdapterFormatError):
        await store.fetch(ref)
    with pytest.raises(AdapterQuarantined, match=r"2 times in a row.*10 s"):
        await store.fetch(ref)
    assert len(sources.reads) == 2
    add(sources, "a")
    assert await load(store, "a") == ref
    store.invalidate(ref.digest)
    assert await store.fetch(ref) == f"handle-{ref.digest}", "registered again, it is tried at once"
    store.close()


async def test_what_is_expected_is_read_once_and_still_counts_as_a_miss(
    store: HostAdapterCache[str], sources: Sources
) -> None:
    add(sources, "a")
    ref = await load(store, "a")
    for is_early in (True, False):  # read before it is asked for, or still being read
        store.invalidate(ref.digest)
        sources.reads.clear()
        before = store.counts.of("host")
        sources.gates["/canonical/a"] = gate = threading.Event()
        prefetching = asyncio.create_task(store.prefetch(ref))
        while not sources.reads:
            await asyncio.sleep(0.001)
        if is_early:
            gate.set()
            await prefetching
        fetching = asyncio.create_task(store.fetch(ref))
        await asyncio.sleep(0)
        gate.set()
        assert await fetching == f"handle-{ref.digest}"
        await prefetching
        assert sources.reads == ["/canonical/a"]
        await store.fetch(ref)
        after = store.counts.of("host")
        assert {name: after.get(name, 0) - before.get(name, 0) for name in ("hits", "misses")} == {
            "hits": 1,
            "misses": 1,
        }


async def test_what_is_expected_fails_for_those_who_ask_for_it(sources: Sources) -> None:
    """The error is the one of reading, not that it failed before; and it is remembered when somebody has met it."""
    store = HostAdapterCache(sources, sources.put, RecordedEvents(), max_bytes=100)
    add(sources, "a")
    ref = await load(store, "a")
    store.invalidate(ref.digest)
    del sources.contents["/canonical/a"]
    sources.reads.clear()
    await store.prefetch(ref)
    assert sources.reads == ["/canonical/a"]
    with pytest.raises(AdapterFormatError):
        await store.fetch(ref)
    with pytest.raises(AdapterQuarantined):
        await store.fetch(ref)
    await store.prefetch(ref)
    assert len(sources.reads) == 2, "what failed for somebody is left alone"
    store.close()


async def test_asking_for_what_is_expected_meets_its_failure(store: HostAdapterCache[str], sources: Sources) -> None:
    add(sources, "a")
    ref = await load(store, "a")
    store.invalidate(ref.digest)
    del sources.contents["/canonical/a"]
    sources.reads.clear()
    sources.gates["/canonical/a"] = gate = threading.Event()
    prefetching = asyncio.create_task(store.prefetch(ref))
    while not sources.reads:
        await asyncio.sleep(0.001)
    fetching = asyncio.create_task(store.fetch(ref))
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(AdapterFormatError):
        await fetching
    await prefetching
    with pytest.raises(AdapterQuarantined):
        await store.fetch(ref)
    assert sources.reads == ["/canonical/a"]


async def test_pinned_adapters_stay_and_what_they_leave_no_room_for_is_told_so(
    store: HostAdapterCache[str], sources: Sources, told: RecordedEvents
) -> None:
    digests = {name: add(sources, name).card.digest for name in "abc"}
    a = await load(store, "a")
    store.pin([digests["a"], "unknown"])
    assert sources.pinned == {digests["a"], "unknown"}
    b = await load(store, "b")
    await load(store, "c")
    assert set(store.cached_digests) == {digests["a"], digests["c"]}, "b was used last, but a is pinned"
    add(sources, "large", size=70)
    with pytest.raises(AdapterTooLarge, match=r"70 bytes, but pinned adapters take 40 of .*host_cache_bytes 100"):
        await load(store, "large")
    assert set(store.cached_digests) == {digests["a"], digests["c"]}
    store.pin([])
    await store.fetch(b)
    assert set(store.cached_digests) == {digests["b"], digests["c"]}
    await load(store, "large")
    assert store._cache.total_bytes == 70
    store.invalidate(a.digest)
    events = [(event, next(name for name in "abc" if digests[name] == digest)) for event, digest in told.moves]
    assert events == [
        ("deleted from host", "b"),
        ("deleted from host", "a"),
        ("fetched again", "b"),
        ("loaded to host", "b"),
        ("deleted from host", "c"),
        ("deleted from host", "b"),
    ]


async def test_whoever_does_not_wait_is_told_to_ask_again_and_it_is_one_miss(
    store: HostAdapterCache[str], sources: Sources
) -> None:
    add(sources, "a")
    ref = await load(store, "a")
    store.invalidate(ref.digest)
    gate = sources.gates["/canonical/a"] = threading.Event()
    before = store.counts.of("host").get("misses", 0)
    assert await store.try_fetch(ref, 0.0) is None
    assert await store.try_fetch(ref, 0.01, again=True) is None
    gate.set()
    assert await store.try_fetch(ref, 600.0, again=True) == f"handle-{ref.digest}"
    assert store.counts.of("host")["misses"] == before + 1
    assert sources.reads[1:] == ["/canonical/a"]


async def test_whoever_asks_again_meets_what_failed_and_others_that_it_did(
    store: HostAdapterCache[str], sources: Sources
) -> None:
    ref = AdapterRef("a", "d" * 64, "t", uri="/canonical/none")
    gate = sources.gates["/canonical/none"] = threading.Event()
    assert await store.try_fetch(ref, 0.0) is None
    gate.set()
    while store._pending:
        await asyncio.sleep(0.001)
    with pytest.raises(AdapterFormatError, match="is broken"):
        await store.try_fetch(ref, 1.0, again=True)
    with pytest.raises(AdapterQuarantined):
        await store.try_fetch(ref, 1.0)
    assert len(sources.reads) == 1


def hanging_hub(sources: Sources, monkeypatch: pytest.MonkeyPatch, number: int) -> tuple[list[str], threading.Event]:
    """Sources of one host, each with a lane of its own, whose reads hang until the event is set."""
    monkeypatch.setattr(sources, "lane", lambda source: source)
    monkeypatch.setattr(sources, "host", lambda source: source.partition("/")[0])
    names, gate = [f"hub/{index}" for index in range(number)], threading.Event()
    for name in names:
        add(sources, name, size=1)
        sources.gates[name] = gate
    return names, gate


async def test_one_hanging_host_leaves_threads_for_others(
    store: HostAdapterCache[str], sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub with more organisations than there are threads for it; each organisation is a lane."""
    names, gate = hanging_hub(sources, monkeypatch, MAX_READERS + 3)
    add(sources, "bucket/a", size=1)
    hanging = [asyncio.create_task(load(store, name)) for name in names]
    while len(sources.reads) < of_one_tenant(MAX_READERS_PER_HOST):
        await asyncio.sleep(0.001)
    await load(store, "bucket/a")
    assert len(sources.reads) == of_one_tenant(MAX_READERS_PER_HOST) + 1
    assert not any(task.done() for task in hanging)
    gate.set()
    await asyncio.gather(*hanging)


async def test_a_flood_of_reads_leaves_readers_to_other_tenants(
    store: HostAdapterCache[str], sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 hanging reads of one host, each with its own lane; other tenants' reads begin at once."""
    names, gate = hanging_hub(sources, monkeypatch, 400)
    for name in ("hub/victim", "hub/other"):
        add(sources, name, size=1)
    flood = [asyncio.create_task(store.load(name, "flood")) for name in names]
    while len(sources.reads) < of_one_tenant(MAX_READERS_PER_HOST):
        await asyncio.sleep(0.001)
    await store.load("hub/victim", "victim")
    await store.load("hub/other", "other")
    assert len(sources.reads) == of_one_tenant(MAX_READERS_PER_HOST) + 2
    assert not any(task.done() for task in flood)
    shared = asyncio.create_task(store.load(names[-1], "victim"))
    while names[-1] not in sources.reads:
        await asyncio.sleep(0.001)
    assert not shared.done(), "it reads by itself what the flood has queued"
    gate.set()
    await asyncio.gather(*flood, shared)


async def test_a_read_that_nobody_asks_about_is_given_up(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads_module, "_CHECK_INTERVAL_S", 0.001)
    now_s = [0.0]
    store = HostAdapterCache(sources, sources.put, RecordedEvents(), max_bytes=100, clock=lambda: now_s[0])
    refs = [AdapterRef(name, name * 64, "t", uri=f"{name}/x") for name in "abc"]
    for ref in refs:
        add(sources, ref.uri)
        sources.gates[ref.uri] = threading.Event()
        assert await store.try_fetch(ref, 0.0) is None
    waiting = asyncio.create_task(store.fetch(refs[1]))
    leaving = asyncio.create_task(store.load("d", "default"))
    add(sources, "d")
    sources.gates["d"] = threading.Event()
    while len(sources.reads) < 4:
        await asyncio.sleep(0.001)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    now_s[0] = ABANDON_S
    assert await store.try_fetch(refs[2], 0.0, again=True) is None
    now_s[0] += 1.0
    while len(sources.abandoned) < 2:
        await asyncio.sleep(0.001)
    assert sorted(sources.abandoned) == ["a/x", "d"]
    assert not waiting.done()
    while store._demand._reading.keys() != {"b/x", "c/x"} or any("a/x" in key for key in store._pending):
        await asyncio.sleep(0.001)
    sources.abandoned.clear()
    with pytest.raises(AdapterMismatch):  # it is read again, not remembered as a failure
        await store.fetch(refs[0])
    for ref in refs[1:]:
        sources.gates[ref.uri].set()
    await asyncio.gather(waiting, return_exceptions=True)
    while store._demand._reading:
        await asyncio.sleep(0.001)
    store.close()


class EndingOnce(Sources):
    """Its first read ends as an abandoned one when `gate` opens; `is_abandoned` once that read is to end."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.is_abandoned = threading.Event(), False

    def abandon(self, source: str) -> None:  # noqa: ARG002
        self.is_abandoned = True

    def from_source(self, source: str, tenant_id: str) -> LocatedAdapter:
        if self.reads:
            return super().from_source(source, tenant_id)
        self.reads.append(source)
        assert self.gate.wait(600)
        raise FetchAbandoned(source)


async def test_who_asks_as_a_read_is_given_up_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request and a load: neither is refused, and nothing is remembered as a failure."""
    monkeypatch.setattr(reads_module, "_CHECK_INTERVAL_S", 0.001)
    sources, now_s = EndingOnce(), [0.0]
    sources.versions["a/x"] = "one"  # callers share a read
    store = HostAdapterCache(sources, sources.put, RecordedEvents(), max_bytes=100, clock=lambda: now_s[0])
    digest = add(sources, "a/x").card.digest
    ref = AdapterRef("a", digest, "t", uri="a/x")
    assert await store.try_fetch(ref, 0.0) is None
    while not sources.reads:
        await asyncio.sleep(0.001)
    now_s[0] = ABANDON_S + 1.0
    while not sources.is_abandoned:
        await asyncio.sleep(0.001)
    num_asked = sources.num_asked
    asking = asyncio.gather(store.try_fetch(ref, 600.0, again=True), store.load("a/x", "t"))
    while sources.num_asked == num_asked:
        await asyncio.sleep(0.001)
    sources.gate.set()
    handle, read = await asking
    assert (handle, read.card.digest, store.failure(ref)) == (f"handle-{digest}", digest, None)
    assert sources.reads == ["a/x", "a/x"]
    store.close()


async def test_other_settings_reach_what_is_here_and_what_comes(
    store: HostAdapterCache[str], sources: Sources, told: RecordedEvents
) -> None:
    for name in "ab":
        add(sources, name)
        await load(store, name)
    gate = sources.gates["slow"] = threading.Event()
    add(sources, "slow")
    slow = asyncio.create_task(load(store, "slow"))
    while "slow" not in sources.reads:
        await asyncio.sleep(0.001)
    other = Sources()
    add(other, "c", size=30)
    store.reconfigure(other, max_bytes=70, policy="lru", trusted=TrustedKeys())
    assert store._cache.total_bytes == 40
    assert [event for event, _ in told.moves] == ["deleted from host"]
    await load(store, "c")
    assert (other.reads, store._cache.total_bytes) == (["c"], 70)
    assert sources.num_closed == 0, "a read that began with it goes on"
    gate.set()
    await slow
    while not sources.num_closed:
        await asyncio.sleep(0.001)


async def test_a_source_that_fails_is_nobody_elses_failure(store: HostAdapterCache[str], sources: Sources) -> None:
    """Two tenants registered the same contents, each from its own place; one place is gone, and memory forgot both."""
    add(sources, "mine")
    add(sources, "theirs", as_name="mine")
    mine, theirs = await load(store, "mine"), await load(store, "theirs")
    assert mine.digest == theirs.digest
    store.invalidate(mine.digest)
    del sources.contents["/canonical/theirs"]
    with pytest.raises(AdapterFormatError):
        await store.fetch(theirs)
    with pytest.raises(AdapterQuarantined):
        await store.fetch(theirs)
    assert store.failure(mine) is None, "it would name the other's place"
    assert await store.fetch(mine) == f"handle-{mine.digest}"


async def test_who_asks_beside_a_source_that_hangs_reads_from_its_own(
    store: HostAdapterCache[str], sources: Sources
) -> None:
    add(sources, "mine")
    add(sources, "theirs", as_name="mine")
    mine, theirs = await load(store, "mine"), await load(store, "theirs")
    store.invalidate(mine.digest)
    gate = sources.gates["/canonical/theirs"] = threading.Event()
    hangs = asyncio.create_task(store.fetch(theirs))
    while "/canonical/theirs" not in sources.reads:
        await asyncio.sleep(0)
    try:
        assert await store.fetch(mine) == f"handle-{mine.digest}"
        assert not hangs.done()
    finally:
        gate.set()
    assert await hangs == f"handle-{mine.digest}"
