"""Fair queueing: who is next, how far apart two tenants can get, and what an absence is worth."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.request import SamplingParams
from app.engine.scheduling import fair_queue
from app.engine.scheduling.fair_queue import (
    HELD_BLOCK_PRICE,
    HELD_ROW_PRICE,
    INPUT_PRICE,
    OUTPUT_PRICE,
    RANK_ROW_PRICE,
    SURCHARGE,
    FairQueue,
)
from app.engine.sequence import Sequence, Status
from tests.budgets import examples
from tests.fakes import FakeBackend, fake_request, fake_spec


def sequence(name: str, tenant: str, *, prompt: int = 4, weight: float = 1.0) -> Sequence:
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    request = fake_request(name, [1] * prompt, tenant_id=tenant, weight=weight, sampling=sampling)
    return Sequence(request, None, fake_spec(), 8)


def take(queue: FairQueue) -> Sequence:
    first = next(queue.candidates())
    queue.charge(first, INPUT_PRICE * first.num_prompt)
    queue.remove(first)
    return first


def names(queue: FairQueue) -> list[str]:
    return [waiting.request_id for waiting in queue.candidates()]


def test_first_come_first_served_within_a_tenant() -> None:
    queue = FairQueue()
    for index in range(5):
        queue.push(sequence(f"r{index}", "a"))
    assert [take(queue).request_id for _ in range(5)] == [f"r{index}" for index in range(5)]
    assert len(queue) == 0


def test_a_flood_does_not_hide_another_tenant() -> None:
    queue = FairQueue()
    for index in range(50):
        queue.push(sequence(f"flood{index}", "a"))
    queue.push(sequence("single", "b"))
    assert "single" in names(queue)[:2]


def test_what_is_charged_while_many_start_at_once_counts_for_whose_turn_is_next() -> None:
    """With an adapter's load, which the length of its prompt does not tell; what had started before costs nothing."""
    queue = FairQueue()
    for index in range(4):
        queue.push(sequence(f"a{index}", "a", prompt=1))
        queue.push(sequence(f"b{index}", "b", prompt=20))
        queue.push(sequence(f"c{index}", "c", prompt=20))
    prices = {"a": 64.0, "b": 20.0, "c": 0.0}
    order = []
    for item in queue.candidates():
        queue.charge(item, prices[item.tenant_id])
        item.status = Status.RUNNING
        order.append(item.tenant_id)
    assert "".join(order) == "abccccbbbaaa"


def test_weights_divide_service() -> None:
    queue = FairQueue()
    for index in range(120):
        queue.push(sequence(f"a{index}", "a", weight=3.0))
        queue.push(sequence(f"b{index}", "b", weight=1.0))
    served = [take(queue).tenant_id for _ in range(80)]
    assert abs(served.count("a") - 60) <= 1


def test_idling_saves_up_no_credit() -> None:
    queue = FairQueue()
    for index in range(40):
        queue.push(sequence(f"a{index}", "a"))
    for _ in range(20):
        take(queue)
    for index in range(40):
        queue.push(sequence(f"late{index}", "late"))
    served = [take(queue).tenant_id for _ in range(20)]
    assert abs(served.count("late") - 10) <= 1


def test_returning_early_costs_nothing_but_gains_nothing() -> None:
    """A tenant that leaves and returns keeps the debt it left with."""
    queue = FairQueue()
    for name in ("a0", "b0"):
        queue.push(sequence(name, name[0]))
    spent = take(queue)
    queue.charge(spent, 1000)
    queue.push(sequence("again", spent.tenant_id))
    other = "b" if spent.tenant_id == "a" else "a"
    queue.push(sequence("other", other))
    assert names(queue) == [f"{other}0", "other", "again"]


def test_preempted_and_urgent_ones_come_first_the_oldest_preempted_ahead() -> None:
    queue = FairQueue()
    waiting = [sequence(f"a{index}", "a") for index in range(3)]
    for item in waiting:
        queue.push(item)
    queue.push(sequence("b", "b"))
    queue.mark_urgent(waiting[2])
    for name in ("younger", "older"):  # preemption takes the youngest first
        queue.push_preempted(sequence(name, "a"))
    assert names(queue)[:3] == ["older", "younger", "a2"]
    assert set(names(queue)[3:]) == {"a0", "a1", "b"}
    assert len(queue) == 6
    assert queue.is_urgent(waiting[2])
    queue.remove(waiting[2])
    assert "a2" not in names(queue)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_backlogged_tenants_stay_within_the_bound(data: st.DataObject) -> None:
    """At most 2 max(longest prompt's price, one batch's output price), over weights."""
    tenants = {f"t{i}": data.draw(st.sampled_from([1.0, 2.0, 4.0])) for i in range(data.draw(st.integers(2, 4)))}
    queue = FairQueue()
    longest, max_running = 32, 4
    count = 0
    running: list[list[object]] = []
    served = dict.fromkeys(tenants, 0.0)

    def price(item: Sequence, amount: float) -> None:
        queue.charge(item, amount)
        served[item.tenant_id] += amount / tenants[item.tenant_id]

    for _ in range(60):
        for tenant, weight in tenants.items():
            waiting = sum(1 for item in queue.candidates() if item.tenant_id == tenant)
            for _ in range(max_running + 1 - waiting):
                queue.push(sequence(f"r{count}", tenant, prompt=data.draw(st.integers(1, longest)), weight=weight))
                count += 1
        while len(running) < max_running:
            first = next(queue.candidates())
            price(first, INPUT_PRICE * first.num_prompt)
            queue.remove(first)
            running.append([first, data.draw(st.integers(1, 12))])
        for entry in running:
            item = entry[0]
            assert isinstance(item, Sequence)
            price(item, OUTPUT_PRICE)
            entry[1] = int(str(entry[1])) - 1
        running = [entry for entry in running if entry[1]]
        bound = 2 * max(INPUT_PRICE * longest, OUTPUT_PRICE * 12 * max_running)
        assert max(served.values()) - min(served.values()) <= bound


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_the_bound_holds_with_loads_held_memory_and_preemptions(data: st.DataObject) -> None:
    """Random lengths, ranks and weights; adapters are loaded, contexts grow, and sequences lose their blocks.

    A preempted sequence is computed again without charge: it is not its tenant's fault. It comes back first.
    """
    tenants = {f"t{i}": data.draw(st.sampled_from([0.5, 1.0, 4.0])) for i in range(data.draw(st.integers(2, 4)))}
    longest, max_running, max_output, max_rank, block_size = 32, 4, 12, 64, 8
    queue, count = FairQueue(), 0
    running: list[tuple[Sequence, list[int]]] = []
    left_of: dict[str, list[int]] = {}

    def push(tenant: str) -> None:
        nonlocal count
        item = sequence(f"r{count}", tenant, prompt=data.draw(st.integers(1, longest)), weight=tenants[tenant])
        item.num_rank_rows_needed = data.draw(st.sampled_from([0, 8, max_rank]))
        queue.push(item)
        count += 1

    for _ in range(40):
        for tenant in tenants:
            waiting = sum(1 for item in queue.candidates() if item.tenant_id == tenant)
            for _ in range(max_running + 1 - waiting):
                push(tenant)
        while len(running) < max_running:
            first = next(queue.candidates())
            left = left_of.get(first.request_id)
            if left is None:
                left = left_of[first.request_id] = [data.draw(st.integers(1, max_output))]
                queue.charge(first, INPUT_PRICE * first.num_prompt)
                if data.draw(st.booleans()):
                    queue.charge(first, RANK_ROW_PRICE * first.num_rank_rows_needed)
            queue.remove(first)
            first.num_blocks = -(-first.num_prompt // block_size)
            running.append((first, left))
        for item, left in running:
            queue.charge_token(item)
            item.num_blocks = min(item.num_blocks + 1, -(-(longest + max_output) // block_size))
            left[0] -= 1
        running = [entry for entry in running if entry[1][0]]
        if running and data.draw(st.integers(0, 9)) == 0:
            victim, _ = running.pop()
            queue.push_preempted(victim)
        blocks = -(-(longest + max_output) // block_size)
        token = OUTPUT_PRICE + HELD_BLOCK_PRICE * blocks + HELD_ROW_PRICE * max_rank
        start = INPUT_PRICE * longest + RANK_ROW_PRICE * max_rank
        bound = 2 * max(start, token * max_output * max_running) / min(tenants.values())
        counters = [queue.counter_of(tenant) for tenant in tenants]
        assert max(counters) - min(counters) <= bound


def test_what_is_held_is_charged_with_each_token() -> None:
    queue = FairQueue()
    small, large = sequence("small", "a", prompt=8), sequence("large", "b", prompt=8, weight=2.0)
    large.num_rank_rows_needed, large.num_blocks = 64, 64
    for item in (small, large):
        queue.push(item)
    for item in (small, large):
        queue.charge_token(item)
    assert (queue.counter_of("a"), queue.counter_of("b")) == (OUTPUT_PRICE, (OUTPUT_PRICE + 2) / 2)


def test_the_gap_is_that_of_tenants_that_wait() -> None:
    queue = FairQueue()
    assert queue.gap() == 0
    items = [sequence(name, name, prompt=8) for name in "abc"]
    for item in items:
        queue.push(item)
    for item, price in zip(items, (10, 40, 100), strict=True):
        queue.charge(item, price)
    queue.remove(items[2])
    assert queue.gap() == 30


def test_who_gave_its_place_is_first_of_its_tenant_and_of_nobody_else() -> None:
    queue = FairQueue()
    items = [sequence(name, name[0]) for name in ("a0", "a1", "b0")]
    for item in items:
        queue.push(item)
    queue.charge(items[0], 100)
    queue.push_back(sequence("a-gave", "a"))
    assert names(queue) == ["b0", "a-gave", "a0", "a1"]
    assert {item.request_id for item in queue.first_of_each()} == {"a-gave", "b0"}
    queue.mark_urgent(items[1])
    assert {item.request_id for item in queue.first_of_each()} == {"a1", "b0"}
    assert (queue.counter_of("a"), queue.counter_of("unknown")) == (100, 0)


def test_the_number_of_remembered_tenants_is_bounded() -> None:
    queue = FairQueue()
    limit = fair_queue.MAX_ABSENT_TENANTS
    for index in range(limit + 10):
        item = sequence(f"r{index}", f"t{index}")
        queue.push(item)
        queue.charge(item, index)
        queue.remove(item)
    queue.push(sequence("here", "t3"))
    queue.forget_absent({"t5"})
    left = queue._interactive.tenants
    assert len(left) <= limit
    assert {"t3", "t5", f"t{limit + 9}"} <= set(left)


def waiting(*tenants: str) -> tuple[FairQueue, dict[str, Sequence]]:
    queue, items = FairQueue(), {name: sequence(name, name) for name in tenants}
    for item in items.values():
        queue.push(item)
    return queue, items


def test_a_tenant_served_by_other_replicas_pays_for_it_with_what_it_gets_here() -> None:
    queue, items = waiting("a", "b", "c")
    queue.add_remote_service({"a": 500.0, "b": 100.0, "c": 0.0}, continues=False)
    assert queue.remote_debt_of("a") == 0, "counting begins"
    queue.add_remote_service({"a": 550.0, "b": 110.0, "c": 10.0}, continues=True)
    assert [queue.remote_debt_of(name) for name in "abc"] == [40, 0, 0], "what all of them had is no difference"
    queue.charge(items["a"], 10)
    assert (queue.counter_of("a"), queue.remote_debt_of("a")) == (10 * SURCHARGE, 10)
    queue.charge(items["a"], 10)
    assert (queue.counter_of("a"), queue.remote_debt_of("a")) == (10 * SURCHARGE + 20, 0)
    assert queue.service().served["a"] == 20, "others learn what it was served"


def test_totals_that_shrink_or_that_nobody_listened_to_charge_nothing() -> None:
    queue, _ = waiting("a", "b")
    for served, continues in (({"a": 50.0}, False), ({"a": 10.0}, True), ({"a": 90.0}, False), ({}, True)):
        queue.add_remote_service(served | {"b": 0.0}, continues=continues)
    queue.add_remote_service({"a": 200.0, "b": 0.0}, continues=True)
    assert queue.remote_debt_of("a") == 0


def test_what_was_served_by_other_replicas_while_a_tenant_did_not_wait_here_is_not_charged() -> None:
    queue, items = waiting("a", "b")
    queue.add_remote_service({"a": 0.0, "b": 0.0}, continues=False)
    queue.remove(items["a"])
    queue.push(sequence("again", "a"))
    queue.add_remote_service({"a": 70.0, "b": 0.0}, continues=True)
    assert queue.remote_debt_of("a") == 0


def test_the_credit_that_an_absence_loses_pays_debts() -> None:
    queue, items = waiting("a", "b")
    for total in (0.0, 100.0):
        queue.add_remote_service({"a": total, "b": 0.0}, continues=total > 0)
    queue.remove(items["a"])
    queue.charge(items["b"], 30)
    queue.push(sequence("again", "a"))
    assert (queue.counter_of("a"), queue.remote_debt_of("a")) == (30, 70)


def test_a_debt_is_bounded_whatever_is_reported() -> None:
    queue, _ = waiting("a", "b")
    for total in (0.0, 1e300):
        queue.add_remote_service({"a": total, "b": 0.0}, continues=total > 0)
    assert queue.remote_debt_of("a") == fair_queue.MAX_REMOTE_DEBT
    assert queue.remote_debt_of("unknown") == 0


def test_an_engine_gives_fewer_turns_to_a_tenant_served_by_other_replicas() -> None:
    """Through its inbox, in the step that follows; a place at a time, so that turns are what is waited for."""
    config = EngineConfig(max_num_seqs=1, enable_prefix_caching=False, speculative_decoding="off")
    engine = Engine(FakeBackend(BackendLimits(64, 8, 0, 8, 1)), config)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for index in range(30):
        for name in "ab":
            engine.submit(fake_request(f"{name}{index}", [1, 2], tenant_id=name, sampling=sampling))
    engine.step()
    assert set(engine.service().waiting) == {"a", "b"}
    for total in (0.0, 1000.0):
        engine.add_remote_service({"a": total, "b": 0.0}, continues=total > 0)
    ended = [chunk.request_id[0] for _ in range(30) for chunk in engine.step()]
    assert abs(ended.count("b") - ended.count("a") * SURCHARGE) <= 2 * SURCHARGE
    served = engine.service().served
    assert served["b"] > served["a"] > 0
