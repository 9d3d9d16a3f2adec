"""Money that an ingress had spent, and told nobody, when it died: the owner learns of it from the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app.deployments.tenancy.quota.leases import HOLDER_TIMEOUT_S, LeaseRequest, QuotaLessor
from app.deployments.tenancy.quota.limits import BudgetCounter, LimitKey
from tests.budgets import examples
from tests.deployments.tenancy.quota.test_rate_limiter import tenant

SPEND = LimitKey("t", "spend")
#: Some of them are most of the limit, 10,000,000.
AMOUNTS = st.integers(1, 40) | st.integers(1, 6_000_000)


@dataclass
class Ingress:
    """`units` may be taken, `running` were, by requests that have not ended; `told` of `used` is known to the owner."""

    name: str
    units: int = 0
    running: list[int] = field(default_factory=list)
    used: int = 0

    @property
    def holding(self) -> int:
        return self.units + sum(self.running)


class Spending(RuleBasedStateMachine):
    """Ingresses of one owner spend a tenant's money; replicas write down what requests cost when they end, some time
    later. `truly` is what all requests that have ended cost, `written` what of it is in the ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000_000_000.0
        self.lender = QuotaLessor(lambda _: tenant(spend_cents=1), lambda *_: 0)
        self.living: list[Ingress] = []
        self.orphans: list[int] = []  # reservations of requests that replicas go on with for nobody
        self.unwritten: list[int] = []
        self.truly = self.written = self.read = 0
        self.num_started = 0
        for _ in range(3):
            self.start()
        self._admit(self.living[0], 1000)
        self._die(self.living[0])
        self.bury()

    @rule()
    def start(self) -> None:
        self.num_started += 1
        self.living.append(Ingress(f"ingress {self.num_started}"))
        self.tell(self.living[-1])

    @rule(data=st.data(), amount=AMOUNTS)
    def admit(self, data: st.DataObject, amount: int) -> None:
        self._admit(data.draw(st.sampled_from(self.living)), amount)

    @rule(data=st.data(), amount=AMOUNTS)
    def answer(self, data: st.DataObject, amount: int) -> None:
        """A request that ends at once."""
        ingress = data.draw(st.sampled_from(self.living))
        if self._admit(ingress, amount):
            self._end(ingress, len(ingress.running) - 1, amount - amount // 4)

    def _admit(self, ingress: Ingress, amount: int) -> bool:
        if ingress.units < amount:
            self.tell(ingress, amount - ingress.units)
        if ingress.units >= amount:
            ingress.units -= amount
            ingress.running.append(amount)
            return True
        return False

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        running = [(ingress, index) for ingress in self.living for index in range(len(ingress.running))]
        if running:
            ingress, index = data.draw(st.sampled_from(running))
            self._end(ingress, index, data.draw(st.integers(0, ingress.running[index])))

    @rule(data=st.data())
    def end_for_nobody(self, data: st.DataObject) -> None:
        if self.orphans:
            self._cost(data.draw(st.integers(0, self.orphans.pop())))

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(0, len(self.unwritten)))):
            self.written += self.unwritten.pop(0)

    @rule(data=st.data())
    def tell_one(self, data: st.DataObject) -> None:
        ingress = data.draw(st.sampled_from(self.living))
        if data.draw(st.booleans()):
            ingress.units = 0  # nobody needs them
        self.tell(ingress)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if len(self.living) > 1:
            self._die(data.draw(st.sampled_from(self.living)))

    @rule()
    def bury(self) -> None:
        self.now_s += HOLDER_TIMEOUT_S - 1
        for ingress in self.living:
            self.tell(ingress)
        self.now_s += 2.0
        for ingress in self.living:
            self.tell(ingress)

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        """One is not heard for so long that it is taken for dead."""
        ingress = data.draw(st.sampled_from(self.living))
        self.now_s += HOLDER_TIMEOUT_S + 1
        for other in self.living:
            if other is not ingress:
                self.tell(other)

    @rule()
    def reckon(self) -> None:
        self.lender.reconcile({"t": self.written}, self.now_s)
        self.read = self.written

    def tell(self, ingress: Ingress, need: int = 0) -> None:
        want = LeaseRequest(SPEND, need, need, holding=ingress.holding, used=ingress.used)
        (grant,) = self.lender.lease(ingress.name, [want], self.now_s)
        ingress.units += grant.granted

    def _die(self, ingress: Ingress) -> None:
        self.living.remove(ingress)
        self.orphans += ingress.running

    def _end(self, ingress: Ingress, index: int, cost: int) -> None:
        ingress.units += ingress.running.pop(index) - cost
        ingress.used += cost
        self._cost(cost)

    def _cost(self, cost: int) -> None:
        self.truly += cost
        self.unwritten.append(cost)

    @property
    def counter(self) -> BudgetCounter:
        counter = self.lender._counters[SPEND]
        assert isinstance(counter, BudgetCounter)
        return counter

    @invariant()
    def counts_what_the_ledger_said_and_no_more_than_was_spent_or_lent(self) -> None:
        counter = self.counter
        counted = counter.used + counter.presumed_used
        assert counted + sum(counter.leased.values()) >= self.read
        assert counter.used <= self.truly
        assert counter.presumed_used <= sum(counter.unreconciled.values())
        assert counted <= self.truly + sum(counter.unreconciled.values())

    def teardown(self) -> None:
        """Everything ends, is told and written, and the ledger is asked once more."""
        for ingress in self.living:
            while ingress.running:
                self._end(ingress, 0, ingress.running[0] // 2)
            ingress.units = 0
        for reserved in self.orphans:
            self._cost(reserved)
        self.written = self.truly
        self.bury()
        self.reckon()
        assert self.counter.used + self.counter.presumed_used == self.truly
        assert self.counter.remaining() == self.counter.limit - self.truly


TestSpending = Spending.TestCase
TestSpending.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


def test_what_the_ledger_knows_before_it_is_told_is_not_counted_twice() -> None:
    counter = BudgetCounter(1000, is_spent=True)
    for holder in ("dead", "alive"):
        counter.report(holder, 100, 0)
    counter.expire(["dead"])
    assert counter.remaining() == 800, "nothing is free before the ledger was asked"
    counter.reconcile(30 + 50)  # the 50 of the other's, which has not told them
    counter.report("alive", 50, 50)
    counter.reconcile(30 + 50)
    assert (counter.used, counter.presumed_used, counter.remaining()) == (50, 30, 1000 - 80 - 50)
    counter.report("dead", 70, 30)  # it lives after all
    assert (counter.used, counter.presumed_used, counter.remaining()) == (80, 0, 1000 - 80 - 50 - 70)
