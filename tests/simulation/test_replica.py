"""One replica on the virtual clock: what is computed by hand here comes out."""

from __future__ import annotations

import math

import pytest

from app.simulation.costs import Costs
from app.simulation.replica import Replica, ReplicaSize, SimulatedRequest

COSTS = Costs(
    step_s=0.1, sequence_s=0.02, row_s=0.001, prompt_token_s=0.01, row_write_s=0.05, row_bytes=1000,
    host_s=0.001, disk_s=0.05, source_s=1.0, start_s=5.0,
)  # fmt: skip


def job(
    index: int, adapter: int | None = None, *, prompt: int = 10, output: int = 5, tenant: str = "t"
) -> SimulatedRequest:
    digest = None if adapter is None else f"d{adapter}"
    return SimulatedRequest(index, 0.0, -1 if adapter is None else adapter, digest, 8, prompt, output, tenant, 1.0)


def run_all(replica: Replica) -> None:
    while (next_s := replica.next_s()) < math.inf:
        replica.run(next_s)


def given(replica: Replica, jobs: list[SimulatedRequest], now_s: float = 0.0) -> None:
    for each in jobs:
        replica.jobs[each.index] = each
        replica.enter(each, now_s)


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    replica, one = Replica("r", 0.0, COSTS, ReplicaSize()), job(0)
    given(replica, [one])
    run_all(replica)
    assert one.first_s == pytest.approx(0.1 + 10 * 0.01)
    assert one.done_s == pytest.approx(one.first_s + 4 * 0.12)


def test_an_adapter_is_written_once_and_makes_steps_longer() -> None:
    replica, one, two = Replica("r", 0.0, COSTS, ReplicaSize()), job(0, 1), job(1, 1)
    given(replica, [one])
    run_all(replica)
    assert one.first_s == pytest.approx(0.1 + 8 * 0.001 + 10 * 0.01 + 8 * 0.05)
    assert one.done_s == pytest.approx(one.first_s + 4 * (0.12 + 8 * 0.001))
    start_s = one.done_s + 1
    given(replica, [two], start_s)
    run_all(replica)
    assert two.first_s == pytest.approx(start_s + 0.1 + 8 * 0.001 + 10 * 0.01), "its rows are there"
    assert (replica.num_loads, replica.num_hits) == (1, 1)


def test_what_arrives_waits_for_the_end_of_the_step() -> None:
    replica, one, two = Replica("r", 0.0, COSTS, ReplicaSize()), job(0, output=100), job(1)
    given(replica, [one])
    given(replica, [two], 0.2 + 2.5 * 0.12)
    run_all(replica)
    assert two.first_s == pytest.approx(0.2 + 3 * 0.12 + 0.12 + 10 * 0.01)


def test_prompts_take_as_much_of_a_step_as_the_pace_allows() -> None:
    """A step of one stream takes 0.12 s alone, so a step with prompts twice that: 12 tokens, but 16 are the least."""
    replica, one, two = Replica("r", 0.0, COSTS, ReplicaSize()), job(0, output=100), job(1, prompt=32)
    given(replica, [one])
    given(replica, [two], 0.2 + 0.5 * 0.12)
    run_all(replica)
    assert two.first_s == pytest.approx(0.2 + 0.12 + 2 * (0.12 + 16 * 0.01))
    wide = Replica("r", 0.0, COSTS, ReplicaSize(prefill_step_s=0.0))
    one, two = job(0, output=100), job(1, prompt=32)
    given(wide, [one])
    given(wide, [two], 0.2 + 0.5 * 0.12)
    run_all(wide)
    assert two.first_s == pytest.approx(0.2 + 0.12 + 0.12 + 32 * 0.01), "without a pace at once"


def test_prompts_that_come_during_a_step_share_the_next() -> None:
    """The first four of 10 tokens, beside one that decodes: 40 tokens are within the pace of one second."""
    replica, jobs = Replica("r", 0.0, COSTS, ReplicaSize(prefill_step_s=1.0)), [job(index) for index in range(4)]
    given(replica, [job(4)])
    given(replica, jobs, 0.1)
    run_all(replica)
    assert [each.first_s for each in jobs] == pytest.approx([0.2 + 0.12 + 4 * 10 * 0.01] * 4)


def test_requests_without_room_wait_and_adapters_in_use_stay() -> None:
    size = ReplicaSize(8, lora_pool_rows=16, rank_alignment=8, max_loras=3, prefill_step_s=0.0)
    replica = Replica("r", 0.0, COSTS, size)
    jobs = [job(index, index % 5) for index in range(40)]
    given(replica, jobs)
    assert replica.num_running == 1, "the others came during its step"
    replica.run(replica.next_s())
    assert replica.num_running == 8, "those of the two adapters that have room, past the others"
    assert replica.num_waiting == 32
    run_all(replica)
    assert all(each.done_s > each.first_s > 0 for each in jobs)
    assert replica.jobs == {}
    replica.pool.check()
    assert replica.pool.num_referenced == 0
    assert replica.num_hits + replica.num_loads == 40


def request_with_prefix(index: int, head: bytes, num_head: int = 30, *, prompt: int = 40) -> SimulatedRequest:
    return SimulatedRequest(index, 0.0, -1, None, 0, prompt, 5, "t", 1.0, head, num_head)


def test_what_a_prompt_begins_with_is_computed_once_as_long_as_it_has_room() -> None:
    replica = Replica("r", 0.0, COSTS, ReplicaSize(kv_tokens=100))
    jobs = [
        request_with_prefix(0, b"one"),
        request_with_prefix(1, b"one"),
        request_with_prefix(2, b"two"),
        request_with_prefix(3, b"one"),
    ]
    starts = []
    for each in jobs:
        starts.append(max(0.0, *(other.done_s for other in jobs[: each.index]), 0.0) + 1.0)
        given(replica, [each], starts[-1])
        run_all(replica)
    assert [each.num_cached for each in jobs] == [0, 30, 0, 0], "the third left the first's no room"
    seconds = [each.first_s - start_s for each, start_s in zip(jobs, starts, strict=True)]
    assert seconds == pytest.approx([0.1 + 0.4, 0.1 + 0.1, 0.1 + 0.4, 0.1 + 0.4])
    assert replica.cached_prefixes[-1] == b"one"


def test_a_tenant_with_a_backlog_does_not_hold_up_another() -> None:
    replica = Replica("r", 0.0, COSTS, ReplicaSize(max_num_seqs=1))
    flood, one = [job(index) for index in range(50)], job(50, tenant="other")
    given(replica, [*flood, one])
    run_all(replica)
    assert sum(each.first_s < one.first_s for each in flood) <= 2
