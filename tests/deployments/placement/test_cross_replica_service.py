"""Fair over several replicas: real fair queues that report to placement and hear what tenants were served elsewhere."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.placement import cross_replica_service as module
from app.deployments.placement.cross_replica_service import CrossReplicaService
from app.deployments.placement.delta_reporter import MAX_REPORTED_TENANTS, DeltaReporter
from app.deployments.placement.messages import ReplicaDelta, ReplicaReport
from app.engine.request import SamplingParams
from app.engine.scheduling import fair_queue
from app.engine.scheduling.fair_queue import INPUT_PRICE, OUTPUT_PRICE, SURCHARGE, FairQueue
from app.engine.sequence import Sequence
from tests.budgets import examples
from tests.deployments.placed import ORIGIN
from tests.fakes import fake_request, fake_spec

LONGEST, MAX_RUNNING, MAX_OUTPUT = 32, 4, 12


class QueueReplica:
    """A replica that is nothing but its fair queue: each step, every running sequence gets a token."""

    def __init__(self, replica_id: str, weights: Mapping[str, float], draw: random.Random) -> None:
        self.replica_id, self.queue, self.weights = replica_id, FairQueue(), weights
        self.reporter, self.listens = DeltaReporter(ORIGIN), False
        self.running: list[tuple[Sequence, list[int]]] = []
        self._draw, self._count = draw, 0

    def fill(self, tenants: tuple[str, ...]) -> None:
        """These tenants wait."""
        for tenant in tenants:
            waiting = sum(item.tenant_id == tenant for item in self.queue.candidates())
            for _ in range(MAX_RUNNING + 1 - waiting):
                self._count += 1
                name = f"{self.replica_id}-{self._count}"
                prompt = [1] * self._draw.randint(1, LONGEST)
                request = fake_request(
                    name, prompt, tenant_id=tenant, weight=self.weights[tenant], sampling=SamplingParams()
                )
                self.queue.push(Sequence(request, None, fake_spec(), 8))

    def step(self) -> None:
        while len(self.running) < MAX_RUNNING and len(self.queue):
            first = next(self.queue.candidates())
            self.queue.charge(first, INPUT_PRICE * first.num_prompt)
            self.queue.remove(first)
            self.running.append((first, [self._draw.randint(1, MAX_OUTPUT)]))
        for item, left in self.running:
            self.queue.charge_token(item)
            left[0] -= 1
        self.running = [entry for entry in self.running if entry[1][0]]

    def report(self) -> ReplicaDelta:
        return self.reporter.next_delta(ReplicaReport(self.replica_id, served=self.queue.service().served))

    def hear(self, books: CrossReplicaService | None) -> None:
        """Ask what tenants were served elsewhere; without an answer it is as `StatusReporter` does."""
        if books is not None:
            waiting = self.queue.service().waiting
            self.queue.add_remote_service(books.elsewhere(self.replica_id, waiting), continues=self.listens)
        self.listens = books is not None

    def served(self, tenant: str) -> float:
        return self.queue.service().served.get(tenant, 0.0)


def bound(weights: Mapping[str, float]) -> float:
    """Of one queue: the fair queue's docstring."""
    return 2 * max(INPUT_PRICE * LONGEST, OUTPUT_PRICE * MAX_OUTPUT * MAX_RUNNING) / min(weights.values())


def of_all(replicas: list[QueueReplica], tenant: str) -> float:
    return sum(replica.served(tenant) for replica in replicas)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_the_bounds_hold_over_replicas_with_lost_and_late_messages(data: st.DataObject) -> None:
    """Tenants wait at some replicas each. Reports and answers are lost, and reports overtake each other."""
    weights = {f"t{i}": data.draw(st.sampled_from([0.5, 1.0, 4.0])) for i in range(data.draw(st.integers(2, 4)))}
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    lost = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    replicas = [QueueReplica(f"r{i}", weights, draw) for i in range(data.draw(st.integers(2, 3)))]
    at = {r.replica_id: tuple(name for name in weights if draw.random() < 0.7) for r in replicas}
    books, late = CrossReplicaService(), list[ReplicaDelta]()
    for step in range(150):
        for replica in replicas:
            replica.fill(at[replica.replica_id])
            if draw.random() < 0.8:  # they are not equally fast
                replica.step()
            if step % 5 == 0 and draw.random() >= lost:
                late.append(replica.report())
        draw.shuffle(late)
        while late and draw.random() < 0.9:
            books.ingest(late.pop())
        for replica in replicas:
            if step % 5 == 0:
                replica.hear(books if draw.random() >= lost else None)
            here = [(name, replica.served(name)) for name in at[replica.replica_id]]
            for one, other in ((a, b) for a in here for b in here):
                assert one[1] >= other[1] / SURCHARGE - bound(weights), "nobody gets less here than that"


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_who_owes_nothing_is_ahead_over_all_replicas_by_no_more_than_the_bound(data: st.DataObject) -> None:
    """Whatever the places, weights and speeds: who is further ahead owes for it where it meets the others."""
    weights = {f"t{i}": data.draw(st.sampled_from([0.5, 1.0, 4.0])) for i in range(data.draw(st.integers(2, 4)))}
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    interval = data.draw(st.sampled_from([1, 5, 20]))
    replicas = [QueueReplica(f"r{i}", weights, draw) for i in range(data.draw(st.integers(2, 4)))]
    speeds = [draw.uniform(0.1, 1.0) for _ in replicas]
    at = {r.replica_id: tuple(name for name in weights if draw.random() < 0.7) for r in replicas}
    books = CrossReplicaService()
    for replica in replicas:
        replica.fill(at[replica.replica_id])
        books.ingest(replica.report())
        replica.hear(books)
    told = {replica.replica_id: dict.fromkeys(weights, 0.0) for replica in replicas}
    known = {replica.replica_id: dict.fromkeys(weights, 0.0) for replica in replicas}
    for step in range(200):
        for replica, speed in zip(replicas, speeds, strict=True):
            replica.fill(at[replica.replica_id])
            if draw.random() < speed:
                replica.step()
        if step % interval == 0:
            for replica in replicas:
                books.ingest(replica.report())
                told[replica.replica_id] = {name: replica.served(name) for name in weights}
            for replica in replicas:
                replica.hear(books)
                others = [each for each in told if each != replica.replica_id]
                known[replica.replica_id] = {name: sum(told[each][name] for each in others) for name in weights}
        for replica in replicas:
            for one, other in combinations(at[replica.replica_id], 2):
                for ahead, behind in ((one, other), (other, one)):
                    debt = replica.queue.remote_debt_of(ahead)
                    assert debt < fair_queue.MAX_REMOTE_DEBT, "or something was forgiven"
                    untold = of_all(replicas, ahead) - replica.served(ahead) - known[replica.replica_id][ahead]
                    lead = of_all(replicas, ahead) - of_all(replicas, behind)
                    assert lead <= SURCHARGE * bound(weights) + debt + untold + 1e-6


def test_a_tenant_with_one_replica_gets_as_much_as_one_that_shares_it_and_has_others() -> None:
    """Where its place has room for that; where it has not, it gets four times as much there."""
    weights = {"one": 1.0, "flood": 1.0, "all": 1.0}
    served: dict[bool, dict[str, float]] = {}
    for shares in (False, True):
        draw = random.Random(0)
        replicas = [QueueReplica("small", weights, draw), QueueReplica("large", weights, draw)]
        at = {"small": ("one", "all"), "large": ("flood", "all", "one-of-large")}
        weights["one-of-large"] = 1.0
        books = CrossReplicaService()
        for step in range(3000):
            for replica in replicas:
                replica.fill(at[replica.replica_id])
                replica.step()
            if step % 20 == 0:
                for replica in replicas:
                    books.ingest(replica.report())
                for replica in replicas:
                    replica.hear(books if shares else None)
        served[shares] = {name: of_all(replicas, name) for name in weights}
    alone, together = served[False], served[True]
    assert alone["all"] > 1.6 * alone["one"], "the flood beside it is nobody's concern at the small one"
    assert abs(together["all"] - together["one"]) <= SURCHARGE * bound(weights) + 20 * MAX_RUNNING * OUTPUT_PRICE
    assert sum(together.values()) == pytest.approx(sum(alone.values()), rel=0.02), "nothing stands idle for it"


def news(replica_id: str, number: int, **served: float) -> ReplicaDelta:
    return ReplicaDelta(replica_id, number, served=served)


def test_what_counts_is_what_came_since_a_replica_first_named_a_tenant() -> None:
    books = CrossReplicaService()
    books.ingest(news("r0", 1, a=100.0))
    assert books.elsewhere("r1", ["a", "b"]) == {"a": 0.0, "b": 0.0}
    books.ingest(news("r0", 2, a=130.0, b=7.0))
    books.ingest(news("r1", 1, a=5.0))
    books.ingest(news("r1", 2, a=7.0))
    assert books.elsewhere("r1", ["a", "b"]) == {"a": 30.0, "b": 0.0}
    assert books.elsewhere("r0", ["a"]) == {"a": 2.0}
    assert books.elsewhere("r2", ["a"]) == {"a": 32.0}


def test_a_message_that_was_overtaken_counts_nothing_twice() -> None:
    books = CrossReplicaService()
    for number, total in ((1, 0.0), (3, 30.0), (2, 20.0), (4, 40.0), (4, 40.0)):
        books.ingest(news("r0", number, a=total))
    assert books.elsewhere("r1", ["a"]) == {"a": 40.0}


def test_a_replica_that_leaves_takes_its_part_along() -> None:
    books = CrossReplicaService()
    for number, total in ((1, 0.0), (2, 30.0)):
        books.ingest(news("r0", number, a=total))
        books.ingest(news("r1", number, a=2 * total))
    books.keep(["r0", "r2"])
    assert books.elsewhere("r2", ["a"]) == {"a": 30.0}
    books.keep([])
    assert books.elsewhere("r2", ["a"]) == {"a": 0.0}
    books.ingest(news("r0", 1, a=500.0))
    assert books.elsewhere("r2", ["a"]) == {"a": 0.0}, "it is heard for the first time"


def test_the_number_of_tenants_of_a_replica_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANTS", 2)
    books = CrossReplicaService()
    books.ingest(news("r0", 1, a=0.0, b=0.0))
    books.ingest(news("r0", 2, b=2.0, a=1.0))
    books.ingest(news("r0", 3, c=0.0))
    assert books.elsewhere("r1", "abc") == {"a": 1.0, "b": 0.0, "c": 0.0}
    books.keep([])
    assert books.elsewhere("r1", "abc") == {"a": 0.0, "b": 0.0, "c": 0.0}


def test_a_report_names_the_tenants_that_were_served_most_since() -> None:
    reporter = DeltaReporter(ORIGIN)
    served = {f"t{index}": float(index) for index in range(MAX_REPORTED_TENANTS + 2)}
    first = reporter.next_delta(ReplicaReport("r0", served=served)).served
    assert set(first) == set(served) - {"t0", "t1"}
    reporter.reset()
    served |= {"t5": 6.0}
    assert reporter.next_delta(ReplicaReport("r0", served=served)).served == {"t5": 6.0, "t1": 1.0}
    assert reporter.next_delta(ReplicaReport("r0", served=served)).served == {}
