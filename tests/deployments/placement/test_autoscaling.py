"""The number of replicas follows tokens, rank rows and KV blocks; spikes hold replicas, and let them go one by one."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from app.config import AppConfig
from app.deployments.placement import autoscaling
from app.deployments.placement.actor import placement_actor
from app.deployments.placement.autoscaling import (
    RESEND_S,
    AdapterDemand,
    Demand,
    Objective,
    decide,
    desired_replicas,
    forecast,
    latest_demands,
)
from app.deployments.rpc.named_actor import NAMESPACE

IDLE = Demand(work_tokens=0, tokens_per_s=500, adapter_rows=0, num_rank_rows=1024, kv_used=0)


def busy(**changes: float) -> Demand:
    return Demand(**({name: getattr(IDLE, name) for name in IDLE.__dataclass_fields__} | changes))


def test_nothing_to_do_asks_for_nothing() -> None:
    assert desired_replicas([], Objective()) == desired_replicas([IDLE, IDLE], Objective())
    assert desired_replicas([IDLE], Objective()).replicas == 0


@pytest.mark.parametrize(
    ("demands", "replicas", "reason"),
    [
        ([busy(work_tokens=3000)], 3000 / (500 * 2), "pending tokens"),
        ([busy(work_tokens=3000), busy(work_tokens=1000, tokens_per_s=100)], 4000 / (500 * 2), "pending tokens"),
        ([busy(adapter_rows=1843.2)], 2.0, "rank rows in demand"),
        ([busy(adapter_rows=921.6), IDLE, busy(adapter_rows=460.8)], 1.5, "rank rows in demand"),
        ([busy(kv_used=0.85), busy(kv_used=0.425)], 1.5, "KV blocks in use"),
        ([busy(kv_used=0.85, work_tokens=1500)], 1.5, "pending tokens"),
        ([busy(work_tokens=1, tokens_per_s=0)], 1.0, "pending tokens"),
        ([busy(num_rank_rows=0, work_tokens=1000)], 1.0, "pending tokens"),
    ],
)
def test_the_signal_that_asks_for_most_decides(demands: list[Demand], replicas: float, reason: str) -> None:
    want = desired_replicas(demands, Objective(target_drain_s=2.0, max_lora_utilization=0.9, max_kv_utilization=0.85))
    assert want.replicas == pytest.approx(replicas)
    assert want.reason == reason


def test_adapters_that_do_not_fit_ask_for_replicas_though_no_token_waits() -> None:
    """What a count of requests never shows: 200 adapters of 16 rows in demand, one after another, on 1,024 rows."""
    churning = busy(adapter_rows=200 * 16, work_tokens=20)
    assert math.ceil(desired_replicas([churning], Objective()).replicas) == 4


def test_a_rising_demand_is_read_ahead_and_a_falling_one_is_not() -> None:
    assert forecast([(0, 1.0), (5, 1.5)], 5, 10) == pytest.approx(2.5)
    assert forecast([(0, 1.0), (5, 4.0)], 5, 10) == pytest.approx(8.0)  # at most twice
    assert forecast([(0, 3.0), (5, 1.0)], 5, 10) == 1.0
    assert forecast([(5, 1.0)], 5, 10) == 1.0
    assert forecast([(0, 1.0), (30, 2.0)], 30, 10) == 2.0  # what was before lately says nothing


def test_a_spike_lets_its_replicas_go_one_by_one() -> None:
    objective = Objective(scale_down_window_s=60, forecast_s=0, scale_down_utilization=0.8)
    counts, history, now, number = [], [(0.0, 4.0)], 0.0, 4
    while number > 1:
        now += 1.0
        history.append((now, 0.4))
        number = decide(history, number, now, objective)
        counts.append(number)
    assert sorted(set(counts), reverse=True) == [4, 3, 2, 1]
    assert counts == sorted(counts, reverse=True)
    assert 20 <= counts.index(3) < counts.index(2) < counts.index(1) <= 60


def test_a_demand_that_wavers_about_a_border_moves_nothing() -> None:
    """Two replicas' worth, a tenth more or less each second: Dynamo's alternating case."""
    history, number, changes = [], 3, 0
    for second in range(300):
        history.append((float(second), 2.0 + 0.2 * (second % 2)))
        before, number = number, decide(history[-60:], number, float(second), Objective())
        changes += number != before
    assert changes <= 1
    assert number == 3


@pytest.mark.parametrize(
    "bad",
    [
        {"target_drain_s": 0},
        {"max_kv_utilization": -1},
        {"scale_down_window_s": math.inf},
        {"scale_down_utilization": 1.5},
        {"max_lora_utilization": "1"},
    ],
)
def test_an_objective_that_decides_nothing_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Objective(**bad)


def context(
    num_replicas: int,
    now_s: float,
    state: dict[str, Any],
    num_requests: float = 0,
    num_silent: int = 0,
    bounds: tuple[int, int] = (0, 1 << 40),
    **series: Any,
) -> Any:
    """What Serve knows of those that speak in `series`, and of so many more that run."""
    raw = {
        name: {replica: [SimpleNamespace(value=value)] for replica, value in values.items()}
        for name, values in series.items()
    }
    return SimpleNamespace(
        app_name="polylora",
        deployment_name="EngineReplica",
        current_num_replicas=len({replica for values in raw.values() for replica in values}) + num_silent,
        target_num_replicas=num_replicas,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
        total_num_requests=num_requests,
        raw_metrics=raw,
        policy_state=state,
        current_time=now_s,
    )


def series_of(demands: dict[str, Demand]) -> dict[str, dict[str, float]]:
    names = Demand.__dataclass_fields__
    return {name: {replica: getattr(demand, name) for replica, demand in demands.items()} for name in names}


def test_the_policy_counts_work_and_not_serves_calls(caplog: pytest.LogCaptureFixture) -> None:
    policy = AdapterDemand(target_drain_s=2.0, forecast_s=0)
    eight_readers = context(1, 100.0, {}, num_requests=8, **series_of({"a": IDLE}))
    assert policy(eight_readers)[0] == 0
    many = context(1, 101.0, {}, num_requests=1, **series_of({"a": busy(work_tokens=2900)}))
    with caplog.at_level("INFO", "ray.serve"):
        count, state = policy(many)
    assert count == 3
    assert "scaling 1 -> 3 replicas: pending tokens need 2.90" in caplog.text
    assert policy(context(3, 102.0, state, **series_of({"a": IDLE})))[0] == 3  # held
    assert policy(context(3, 200.0, state, **series_of({"a": IDLE})))[0] == 0


def test_whoever_waits_where_nobody_is_wakes_one() -> None:
    policy = AdapterDemand()
    assert policy(context(0, 1.0, {}))[0] == 0
    assert policy(context(0, 2.0, {}, num_requests=1))[0] == 1


def test_who_was_woken_is_not_sent_away_before_its_work_has_reached_it() -> None:
    policy = AdapterDemand(scale_down_window_s=10.0, forecast_s=0)
    state: dict[str, Any] = {}
    for second in range(100):  # it is starting, and says nothing
        count, state = policy(context(1, float(second), state, num_requests=1))
        assert count == 1
    idle = series_of({"a": IDLE})
    for second in range(100, 109):
        count, state = policy(context(1, float(second), state, **idle))
        assert count == 1, "what it was woken for is on its way"
    assert policy(context(1, 110.0, state, **idle))[0] == 0
    assert policy(context(2, 300.0, {}))[0] == 2, "where nothing is known of any, none is sent away"


def test_a_replica_counts_with_what_it_has_said() -> None:
    """One that has not said a number yet counts by the others; one whose numbers are none says nothing by them."""
    points = [SimpleNamespace(value=1.0)]
    series = {name: {"a": points, "b": points} for name in Demand.__dataclass_fields__}
    series["kv_used"] = {"a": points, "b": []}
    series["adapter_rows"] = {"a": [SimpleNamespace(value=math.nan)]}
    assert latest_demands(series) == [Demand(1.0, 1.0, 0.0, 1.0, 1.0), Demand(1.0, 1.0, 0.0, 1.0, 0.0)]
    assert latest_demands({}) == []
    assert latest_demands({"work_tokens": {"a": []}, "not ours": {"a": points}}) == []


def test_no_replica_is_sent_away_while_one_says_nothing() -> None:
    policy = AdapterDemand(scale_down_window_s=5.0, forecast_s=0)
    idle = series_of({"a": IDLE, "b": IDLE})
    assert policy(context(3, 100.0, {}, num_silent=1, **idle))[0] == 3
    assert policy(context(3, 101.0, {}, **idle))[0] == 0
    assert policy(context(2, 102.0, {}, num_silent=1, **idle))[0] == 0, "the third is to leave anyway"
    much = series_of({"a": busy(work_tokens=4000)})
    assert policy(context(2, 103.0, {}, num_silent=1, **much))[0] == 4, "more are had at once"


def test_a_clock_that_is_set_back_holds_no_replica_and_foresees_nothing() -> None:
    policy = AdapterDemand(target_drain_s=2.0, scale_down_window_s=60.0, forecast_s=10.0)
    _, state = policy(context(4, 100_000.0, {}, **series_of({"a": busy(work_tokens=4000)})))
    idle = series_of({"a": busy(work_tokens=400)})
    count, state = policy(context(4, 90_000.0, state, **idle))
    assert count == 1, "an hour's hold"
    assert policy(context(1, 90_001.0, state, **series_of({"a": busy(work_tokens=900)})))[0] <= 2


#: Whatever arrives where a number should: Serve checks the first answer of a replica only.
nonsense = st.one_of(
    st.floats(), st.integers(), st.none(), st.text(), st.booleans(), st.sampled_from([1e308, 5e-324, -1.0])
)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 2e9),
            st.integers(0, 1000),
            st.integers(0, 5),
            st.dictionaries(
                st.sampled_from([*Demand.__dataclass_fields__, "other"]),
                st.dictionaries(st.sampled_from("abc"), nonsense),
            ),
        ),
        max_size=8,
    )
)
def test_nothing_that_replicas_say_and_no_clock_stops_the_policy(calls: list[Any]) -> None:
    policy, state = AdapterDemand(), {}
    for now_s, num_replicas, num_silent, series in calls:
        count, state = policy(context(num_replicas, now_s, state, num_silent=num_silent, **series))
        assert type(count) is int
        assert 0 <= count <= 2_000_000


def test_serve_takes_the_policy_by_its_name_and_refuses_other_options() -> None:
    name = f"{autoscaling.__name__}:AdapterDemand"
    config = AutoscalingConfig(
        max_replicas=4, policy=AutoscalingPolicy(policy_function=name, policy_kwargs={"target_drain_s": 3})
    )
    made = config.policy.get_policy()
    assert made(**config.policy.policy_kwargs)(context(0, 0.0, {}, num_requests=1))[0] == 1
    with pytest.raises(TypeError, match="patience"):
        made(patience=1)


class Placement:
    """The placement actor as Ray gives it to the policy's thread; an exception instead of it if it is missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, list[autoscaling.Decision]]] = []
        self.asked: list[tuple[str, str]] = []
        self.missing: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.report_scaling = SimpleNamespace(remote=lambda *call: self.sent.append(call))
        monkeypatch.setattr(autoscaling.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(autoscaling.ray, "get_actor", self.find)
        monkeypatch.setattr(autoscaling.ray, "get", lambda _, timeout: timeout)

    def find(self, name: str, namespace: str) -> Placement:
        self.asked.append((name, namespace))
        assert self.answers.wait(60)
        if self.missing is not None:
            raise self.missing
        return self


def sent(policy: AdapterDemand) -> None:
    """Wait until the policy's thread has ended."""
    assert policy._sender is not None
    policy._sender.join(60)


MUCH = series_of({"a": busy(work_tokens=2900)})


def test_decisions_reach_the_placement_actor_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    placement, policy = Placement(monkeypatch), AdapterDemand(target_drain_s=2.0, forecast_s=0)
    policy(context(0, 100.0, {}, num_requests=1))
    sent(policy)
    policy(context(1, 101.0, {}, **MUCH))
    sent(policy)
    woken, scaled = (100.0, 0, 1, "waiting requests", 1.0), (101.0, 1, 3, "pending tokens", pytest.approx(2.9))
    assert placement.sent == [("EngineReplica", [woken]), ("EngineReplica", [woken, scaled])]
    actor = placement_actor(AppConfig.model_validate({"model": {"name": "base"}}), "polylora")
    assert {*placement.asked} == {(actor._name, NAMESPACE)}


def test_a_decision_is_noted_once_and_within_serves_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    Placement(monkeypatch)
    policy = AdapterDemand(target_drain_s=2.0, forecast_s=0, scale_down_window_s=0)
    for now_s, target in ((1.0, 1), (1.1, 1), (1.2, 1), (2.0, 2), (3.0, 2)):  # Serve acts after its delay
        count, _ = policy(context(target, now_s, {}, bounds=(1, 2), **MUCH))
        assert count == 3, "Serve applies its bounds itself"
    idle = series_of({"a": IDLE, "b": IDLE})
    for now_s, target in ((10.0, 2), (11.0, 2), (12.0, 1), (13.0, 1)):
        policy(context(target, now_s, {}, bounds=(1, 2), **idle))
    assert [each[:4] for each in policy._decisions] == [(1.0, 1, 2, "pending tokens"), (10.0, 2, 1, "nothing to do")]


def test_a_replica_that_serve_starts_for_waiting_requests_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without replicas Serve decides by itself, and asks the policy again once one runs."""
    Placement(monkeypatch)
    policy, idle = AdapterDemand(), series_of({"a": IDLE})
    policy(context(0, 1.0, {}))
    for now_s, series in ((9.0, {}), (10.0, {}), (11.0, idle)):
        policy(context(1, now_s, {}, bounds=(1, 4), **series))
    assert list(policy._decisions) == [(9.0, 0, 1, "waiting requests", 1.0)]


def test_a_missing_or_hanging_placement_actor_holds_up_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    placement, policy = Placement(monkeypatch), AdapterDemand(target_drain_s=2.0, forecast_s=0)
    placement.answers.clear()
    placement.missing = ValueError("no such actor")
    with caplog.at_level("WARNING", "ray.serve"):
        for second in range(5):
            assert policy(context(1 + second % 2, float(second), {}, **MUCH))[0] == 3
        assert len(placement.asked) == 1, "one thread, however long it waits"
        placement.answers.set()
        sent(policy)
    assert "did not reach placement: no such actor" in caplog.text
    placement.missing = None
    policy(context(3, 5.0, {}, **MUCH))
    sent(policy)
    assert len(placement.sent[-1][1]) == 5, "those that were decided meanwhile, and what was lost"
    policy(context(3, 6.0, {}, **MUCH))
    assert len(placement.sent) == 1, "nothing is new"
    policy._sent_s -= RESEND_S
    policy(context(3, 7.0, {}, **MUCH))
    sent(policy)
    assert len(placement.sent) == 2, "an actor that has restarted since has none"


def test_the_policy_runs_where_the_package_is_not_installed() -> None:
    """Serve's controller may run on a machine without this package: it is sent the module's source."""
    policy = AutoscalingPolicy(policy_function=f"{autoscaling.__name__}:AdapterDemand")
    code = (
        "import sys; sys.modules['app'] = None\n"
        "from ray import cloudpickle; from types import SimpleNamespace as N\n"
        f"policy = cloudpickle.loads({policy.get_serialized_policy_def()!r})()\n"
        "print(policy(N(app_name='a', deployment_name='d', target_num_replicas=0, total_num_requests=2.0,"
        " capacity_adjusted_min_replicas=0, capacity_adjusted_max_replicas=1, current_time=1.0))[0])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert answer.stdout.strip() == "1", answer.stderr
