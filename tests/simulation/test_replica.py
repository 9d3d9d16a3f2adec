"""One replica on the virtual clock: what is computed by hand here comes out."""

from __future__ import annotations

import math

import pytest

from app.simulation.costs import Costs
from app.simulation.replica import Job, Replica, ReplicaSize

COSTS = Costs(
    step_s=0.1, sequence_s=0.02, row_s=0.001, prompt_token_s=0.01, row_write_s=0.05, row_bytes=1000,
    host_s=0.001, disk_s=0.05, source_s=1.0, start_s=5.0,
)  # fmt: skip


def job(index: int, adapter: int | None = None, *, prompt: int = 10, output: int = 5, tenant: str = "t") -> Job:
    digest = None if adapter is None else f"d{adapter}"
    return Job(index, 0.0, -1 if adapter is None else adapter, digest, 8, prompt, output, tenant, 1.0)


def run_all(replica: Replica) -> None:
    while (next_s := replica.next_s()) < math.inf:
        replica.run(next_s)


def given(replica: Replica, jobs: list[Job], now_s: float = 0.0) -> None:
    for each in jobs:
        replica.jobs[each.index] = each
        replica.enter(each, now_s)


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    replica, one = Replica("r", 0.0, COSTS, ReplicaSize()), job(0)
    given(replica, [one])
    run_all(replica)
    assert one.first_s == pytest.approx(0.1)
    assert one.done_s == pytest.approx(0.1 + 4 * 0.12)


def test_an_adapter_is_written_once_and_makes_steps_longer() -> None:
    replica, one, two = Replica("r", 0.0, COSTS, ReplicaSize()), job(0, 1), job(1, 1)
    given(replica, [one])
    run_all(replica)
    assert one.first_s == pytest.approx(0.1 + 8 * 0.05)
    assert one.done_s == pytest.approx(one.first_s + 4 * (0.12 + 8 * 0.001))
    start_s = one.done_s + 1
    given(replica, [two], start_s)
    run_all(replica)
    assert two.first_s == pytest.approx(start_s + 0.1), "its rows are there"
    assert (replica.num_loads, replica.num_hits) == (1, 1)


def test_prompts_take_half_of_the_time_from_streams() -> None:
    replica, one, two = Replica("r", 0.0, COSTS, ReplicaSize()), job(0, output=100), job(1)
    given(replica, [one])
    replica.run(0.1)
    given(replica, [two], 0.1)
    run_all(replica)
    assert two.first_s == pytest.approx(0.1 + 2 * 0.1)


def test_requests_without_room_wait_and_adapters_in_use_stay() -> None:
    size = ReplicaSize(max_batch_sequences=8, adapter_rank_rows=16, rank_alignment=8, max_adapter_slots=3)
    replica = Replica("r", 0.0, COSTS, size)
    jobs = [job(index, index % 5) for index in range(40)]
    given(replica, jobs)
    assert {each.adapter for each in replica.jobs.values() if each.num_kv_tokens and each.left_s} <= {0, 1}
    assert replica.num_running == 8, "those of the two adapters that have room, past the others"
    assert replica.num_waiting == 32
    run_all(replica)
    assert all(each.done_s > each.first_s > 0 for each in jobs)
    assert replica.jobs == {}
    replica.pool.check()
    assert replica.pool.num_referenced == 0
    assert replica.num_hits + replica.num_loads == 40


def test_a_tenant_with_a_backlog_does_not_hold_up_another() -> None:
    replica = Replica("r", 0.0, COSTS, ReplicaSize(max_batch_sequences=1))
    flood, one = [job(index) for index in range(50)], job(50, tenant="other")
    given(replica, [*flood, one])
    run_all(replica)
    assert sum(each.first_s < one.first_s for each in flood) <= 2
