"""Who starts when: no request starves, none blocks the others, writes keep to their budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from app.engine.adapters.adapter import LoraAdapter
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.meter import EngineMeter
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.block_pool import BlockPool
from app.engine.request import SamplingParams
from app.engine.scheduling.admission import MAX_BYPASSES, Admission
from app.engine.scheduling.fair_queue import FairQueue
from app.engine.sequence import Sequence
from tests.fakes import FakeBackend, fake_adapter, fake_request, fake_spec


class Bench:
    """An engine that is stepped while others keep it full; notes in which step each request ended."""

    def __init__(self, limits: BackendLimits, **config: int | bool) -> None:
        self.backend = FakeBackend(limits)
        self.engine = Engine(self.backend, EngineConfig.model_validate(config), clock=lambda: 0.0)
        self.step = 0
        self.first: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.live: Counter[str] = Counter()
        self._count = 0

    def submit(
        self,
        kind: str,
        adapter: LoraAdapter | None = None,
        *,
        tokens: int = 4,
        prompt: int = 4,
        tenant_id: str = "default",
    ) -> str:
        self._count += 1
        name = f"{kind}:{self._count}"
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        prompt_ids = [self._count % 60, self._count // 60 % 60] * prompt
        request = fake_request(name, prompt_ids[:prompt], adapter, sampling=sampling, tenant_id=tenant_id)
        self.engine.submit(request, adapter)
        self.live[kind] += 1
        return name

    def run(self, num_steps: int, refill: Callable[[], None] | None = None, until: str | None = None) -> int | None:
        """Step; the step in which `until` ended, or None if it has not."""
        for _ in range(num_steps):
            if refill is not None:
                refill()
            for chunk in self.engine.step():
                self.first.setdefault(chunk.request_id, self.step)
                if chunk.finish_reason is not None:
                    assert chunk.finish_reason in ("length", "abort")
                    self.ended[chunk.request_id] = self.step
                    self.live[chunk.request_id.split(":")[0]] -= 1
            self.engine.check()
            self.step += 1
            if until in self.ended:
                return self.ended[until]
        return None


def test_a_large_adapter_gets_its_rows_while_small_ones_flood() -> None:
    bench = Bench(BackendLimits(256, 8, 64, 8, 16), max_num_seqs=8)
    small = [fake_adapter(f"s{i}", 8) for i in range(8)]

    def flood() -> None:
        while bench.live["small"] < 24:
            bench.submit("small", small[bench._count % 8], tokens=6)

    bench.run(20, flood)
    large = fake_adapter("large", 64)
    name = bench.submit("large", large)
    assert bench.run(60, flood, until=name) is not None


def test_how_many_may_pass_is_bounded() -> None:
    bench = Bench(BackendLimits(256, 8, 16, 8, 16), max_num_seqs=4)
    one = fake_adapter("one", 8)
    bench.submit("small", one, tokens=100)
    bench.run(1)
    large = bench.submit("large", fake_adapter("large", 16))
    passing = [bench.submit("small", one, tokens=1) for _ in range(4 * MAX_BYPASSES)]
    assert bench.run(99, until=large) is None
    assert MAX_BYPASSES <= sum(name in bench.ended for name in passing) <= MAX_BYPASSES + 4
    assert bench.run(10, until=large) is not None
    bench.run(100)
    assert set(passing) <= set(bench.ended)


def test_a_reservation_ends_with_its_request() -> None:
    bench = Bench(BackendLimits(256, 8, 16, 8, 16), max_num_seqs=4)
    one = fake_adapter("one", 8)
    bench.submit("small", one, tokens=200)
    bench.run(1)
    large = bench.submit("large", fake_adapter("large", 16))
    passing = [bench.submit("small", one, tokens=1) for _ in range(4 * MAX_BYPASSES)]
    bench.run(50)
    assert not set(passing) <= set(bench.ended)
    bench.engine.abort(large)
    bench.run(50)
    assert set(passing) <= set(bench.ended)


def test_a_long_prompt_gets_its_blocks_while_short_ones_flood() -> None:
    bench = Bench(
        BackendLimits(32, 8, 0, 8, 1), max_num_seqs=16, max_num_batched_tokens=64, enable_prefix_caching=False
    )

    def flood() -> None:
        while bench.live["short"] < 40:
            bench.submit("short", prompt=6, tokens=4 + bench._count * 7 % 17)

    bench.run(20, flood)
    name = bench.submit("long", prompt=200, tokens=4)
    assert bench.run(120, flood, until=name) is not None


def test_base_traffic_is_not_blocked_by_adapter_misses() -> None:
    bench = Bench(BackendLimits(256, 8, 8, 8, 4), max_num_seqs=8)
    bench.submit("holder", fake_adapter("holder", 8), tokens=200)
    bench.run(1)
    for index in range(100):
        bench.submit("miss", fake_adapter(f"m{index}", 8))
    for _ in range(40):
        name = bench.submit("base", tokens=2)
        started = bench.step
        assert bench.run(4, until=name) is not None, f"a base request waited {bench.step - started} steps"
    assert bench.live["miss"] == 100


def test_only_the_adapter_in_the_reserved_rows_has_to_pause() -> None:
    bench = Bench(BackendLimits(256, 8, 32, 8, 4), max_num_seqs=8)
    residents = {"one": fake_adapter("one", 16), "two": fake_adapter("two", 16)}
    for kind, adapter in residents.items():
        bench.submit(f"stream {kind}", adapter, tokens=120)

    def traffic() -> None:
        for kind, adapter in residents.items():
            while bench.live[kind] < 3:
                bench.submit(kind, adapter)

    bench.run(10, traffic)
    cold = bench.submit("cold", fake_adapter("cold", 16))
    bench.run(50, traffic)
    before = set(bench.ended)
    bench.run(40, traffic)
    since = Counter(name.split(":")[0] for name in set(bench.ended) - before)
    assert len(since) == 1, "the other one waits behind the reservation"
    assert since.popitem()[1] >= 20
    assert bench.run(60, traffic, until=cold) is not None


def test_many_starving_adapters_are_all_served() -> None:
    bench = Bench(BackendLimits(256, 8, 16, 8, 4), max_num_seqs=4)
    hot = fake_adapter("hot", 8)

    def flood() -> None:
        while bench.live["hot"] < 8:
            bench.submit("hot", hot)

    bench.run(5, flood)
    cold = [bench.submit("cold", fake_adapter(f"c{i}", rank)) for i, rank in enumerate([16, 8, 16, 16, 8, 16])]
    bench.run(400, flood)
    assert set(cold) <= set(bench.ended)


def test_writes_keep_to_the_budget_and_a_larger_adapter_still_gets_through() -> None:
    bench = Bench(BackendLimits(256, 8, 256, 8, 40), lora_load_bytes_per_step=100)
    bench.submit("stream", tokens=100)
    bench.run(1)
    sizes = [60, 60, 40, 250, 30, 30, 30, 60, 100, 99, 1]
    for index, size in enumerate(sizes):
        bench.submit("cold", fake_adapter(f"c{index}", 8, size_bytes=size), tokens=30)
    bench.run(60)
    assert len(bench.ended) == len(sizes)
    assert bench.live["stream"] == 1, "there was always somebody to spare"
    per_step: dict[int, list[int]] = {}
    for step, _, size in bench.backend.writes:
        per_step.setdefault(step, []).append(size)
    assert sorted(size for step in per_step.values() for size in step) == sorted(sizes)
    assert all(sum(step) <= 100 or len(step) == 1 for step in per_step.values())
    assert len(per_step) <= 10, "the budget is used, not one write per step"


@pytest.mark.parametrize("size", [100, 101, 150])
def test_what_is_on_the_device_does_not_wait_for_others_writes(size: int) -> None:
    bench = Bench(BackendLimits(256, 8, 256, 8, 40), lora_load_bytes_per_step=100)
    hot, cold = fake_adapter("hot", 8, size_bytes=size), fake_adapter("cold", 8, size_bytes=size)
    warm = bench.submit("warm", hot, tokens=1)
    assert bench.run(3, until=warm) is not None
    bench.submit("stream", tokens=60)
    bench.run(1)
    names = [bench.submit("cold", cold, tokens=60) for _ in range(3)]
    for index in range(5):
        bench.submit("cold", fake_adapter(f"c{index}", 8, size_bytes=size), tokens=60)
    names.append(bench.submit("hit", hot))
    started = bench.step
    bench.run(2)
    assert [bench.first.get(name) for name in names] == [started] * 4, "nor for its own write in the same step"


def test_with_nothing_running_cold_adapters_are_written_together() -> None:
    bench = Bench(BackendLimits(256, 8, 256, 8, 40), lora_load_bytes_per_step=100)
    names = [bench.submit("cold", fake_adapter(f"c{i}", 8, size_bytes=100), tokens=9) for i in range(5)]
    bench.run(1)
    assert len({step for step, _, _ in bench.backend.writes}) == 1
    assert [bench.first[name] for name in names] == [bench.first[names[0]]] * 5
    late = [bench.submit("cold", fake_adapter(f"d{i}", 8, size_bytes=100), tokens=9) for i in range(3)]
    bench.run(8)
    assert len({bench.first[name] for name in late}) == 3


def test_streams_keep_their_pace_during_a_burst_of_cold_adapters() -> None:
    bench = Bench(BackendLimits(256, 8, 256, 8, 40), lora_load_bytes_per_step=100)
    stream = bench.submit("stream", tokens=50)
    bench.run(1)
    for index in range(20):
        bench.submit("cold", fake_adapter(f"c{index}", 8, size_bytes=100))
    assert bench.run(60, until=stream) == 49


def test_a_flooding_tenant_does_not_move_anothers_latency() -> None:
    def latency(flood_size: int) -> list[int]:
        bench = Bench(BackendLimits(512, 8, 0, 8, 1), max_num_seqs=8, max_num_batched_tokens=64)

        def flood() -> None:
            while bench.live["flood"] < flood_size:
                bench.submit("flood", prompt=40, tokens=8, tenant_id="flood")

        bench.run(20, flood)
        waits = []
        for _ in range(10):
            name = bench.submit("quiet", prompt=8, tokens=4, tenant_id="quiet")
            started = bench.step
            assert bench.run(60, flood, until=name) is not None
            waits.append(bench.first[name] - started)
        return waits

    assert max(latency(100)) <= max(latency(10)) + 2
    assert max(latency(100)) <= 8


def test_a_long_prompt_does_not_hold_up_short_ones() -> None:
    bench = Bench(BackendLimits(512, 8, 0, 8, 1), max_num_batched_tokens=32, max_model_len=512)
    long = bench.submit("long", prompt=500, tokens=2)
    bench.run(1)
    for tenant_id in ("default", "other"):
        name = bench.submit("short", prompt=10, tokens=1, tenant_id=tenant_id)
        started = bench.step
        ended = bench.run(5, until=name)
        assert ended is not None, tenant_id
        assert ended - started <= 1
    ended = bench.run(60, until=long)
    assert ended is not None
    assert ended <= 2 * (500 // 32) + 4


def test_whoever_is_preempted_finishes_before_those_that_came_later() -> None:
    bench = Bench(BackendLimits(10, 8, 0, 8, 1), max_num_seqs=6, enable_prefix_caching=False)
    names = [bench.submit("r", prompt=8, tokens=40, tenant_id=f"t{i % 2}") for i in range(8)]
    bench.run(1000)
    assert bench.engine.stats().num_preemptions > 0
    ends = [bench.ended[name] for name in names]
    assert ends[0] == min(ends)
    assert max(ends[:4]) < max(ends[4:])


def test_whoever_is_preempted_returns_before_those_still_waiting() -> None:
    bench = Bench(BackendLimits(7, 8, 0, 8, 1), max_num_seqs=3, enable_prefix_caching=False)
    names = [bench.submit("r", prompt=7, tokens=30) for _ in range(8)]
    bench.run(1000)
    assert bench.engine.stats().num_preemptions > 0
    ends = [bench.ended[name] for name in names]
    assert ends == sorted(ends)


def test_tokens_that_no_waiting_request_can_use_go_to_the_prompt() -> None:
    limits = BackendLimits(512, 8, 8, 8, 4)
    bench = Bench(limits, max_num_batched_tokens=32, max_model_len=512, max_tenant_slowdown=0)
    bench.submit("holder", fake_adapter("holder", 8), tokens=100)
    bench.run(1)
    bench.submit("miss", fake_adapter("miss", 8), tenant_id="other")
    long = bench.submit("long", prompt=480, tokens=1)
    assert bench.run(40, until=long) == 1 + 480 // 31


def test_a_flood_of_cold_adapters_does_not_move_anothers_turn() -> None:
    """Waiting long does not make a whole backlog urgent: the fair order still decides."""
    bench = Bench(BackendLimits(256, 8, 16, 8, 4), max_num_seqs=8)

    def flood() -> None:
        while bench.live["flood"] < 100:
            bench.submit("flood", fake_adapter(f"f{bench._count}", 8), tenant_id="flood")
        while bench.live["base"] < 4:
            bench.submit("base", tokens=2, tenant_id="base")

    bench.run(200, flood)
    name = bench.submit("quiet", fake_adapter("quiet", 8), tenant_id="quiet")
    assert bench.run(40, flood, until=name) is not None


def test_whoever_rows_are_reserved_for_is_not_passed_over_when_one_before_it_has_to_wait() -> None:
    """A small request is first in line: preempted, its adapter gone for pinned ones. Only reserved rows are left."""
    queue, pool = FairQueue(), AdapterPool(32, 8, 8)
    admission = Admission(queue, BlockPool(64, 8), pool, EngineMeter(), max_write_bytes=1 << 20)

    def waiting(name: str, rank: int) -> Sequence:
        adapter = fake_adapter(name, rank)
        return Sequence(fake_request(name, [1], adapter), adapter, fake_spec(), 8)

    for name in "wxyz":
        assert pool.acquire(name, 8) is not None
    large, small = waiting("large", 16), waiting("small", 8)
    queue.push(large)
    queue.mark_urgent(large)
    assert admission.admit(8, 64, 0).sequences == []
    assert pool.reserved_for == large.adapter_digest
    for name in "wxyz":
        pool.release(name)
    pool.pin(["pinned", "pinned too"])
    for name in ("pinned", "pinned too"):
        assert pool.acquire(name, 8) is not None
        pool.release(name)
    queue.push_preempted(small)
    admission.reopen()
    assert admission.admit(8, 64, 0).sequences == [large]
    pool.check()


def test_nobody_s_many_adapters_push_out_another_s_one() -> None:
    """Two tenants share 32 rows; one asks for ten adapters all the time, the other now and then for its own."""
    bench = Bench(BackendLimits(64, 8, 32, 8, 16), max_num_seqs=8)
    many = [fake_adapter(f"many{index}", 8) for index in range(10)]
    one = fake_adapter("one", 8, size_bytes=many[0].card.size_bytes + 1)  # to tell its writes from theirs
    count = iter(range(10**6))

    def flood() -> None:
        while bench.live["many"] < 12:
            bench.submit("many", many[next(count) % len(many)], tenant_id="many")

    for _ in range(20):
        name = bench.submit("one", one, tenant_id="one")
        assert bench.run(200, flood, until=name) is not None
        bench.run(7, flood)
    num_writes = Counter(size for _, _, size in bench.backend.writes)
    assert num_writes[one.card.size_bytes] == 1
    assert num_writes[many[0].card.size_bytes] > 10
