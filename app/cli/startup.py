"""A service's startup and replicas, as `polylora serve` reports them.

`wait_until_ready` returns when every application runs and ours answers. It raises EngineFailure with one line as soon
as waiting is pointless: Serve has given up an application, an actor could not be created, HAProxy exits repeatedly, or
replicas fit on no machine (`no_room`; resources of other jobs' tasks and placement groups are not counted).
`ReplicaWatch` reports replicas lost while the service runs, but not those stopped by a redeployment or by autoscaling.
"""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.engine import errors
from app.engine.errors import EngineFailure

if TYPE_CHECKING:
    from app.deployments.rpc.ray_private import ActorLocation

#: A first start compiles kernels for most of a minute, and a large model takes time to load.
START_TIMEOUT_S = 900.0
#: How often Serve is asked during the start: each time takes it and this process 10 ms of the CPU that replicas need.
STATUS_INTERVAL_S = 0.3
#: Serve restarts HAProxy; after this many failures it will not recover.
MAX_HA_PROXY_FAILURES = 3
#: Ray counts resources in ten-thousandths.
_LEAST = 1e-4
#: A shortage of this duration is reported: Ray needs less time to place what fits.
PATIENCE_S = 5.0
#: In our own cluster a shortage is permanent; the command ends after this long.
OWN_CLUSTER_LIMIT_S = 20.0
#: Statuses of a deployment whose replicas Serve stops itself.
ON_PURPOSE = frozenset({"UPDATING", "UPSCALING", "DOWNSCALING"})
#: The last line of a traceback: the exception's class, with or without its module, and its message.
_RAISED = re.compile(r"^\s*(?:[a-zA-Z_][\w.]*\.)?([A-Z]\w+): (\S.*)$", re.MULTILINE)
#: Classes that wrap another exception and do not name the cause.
_WRAPPERS = ("RayTaskError", "RuntimeError", "ActorDiedError", "RayActorError")


class StartError(EngineFailure):
    """The service does not start; `details` is the full text from Ray or Serve."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(f"the service does not start: {message}")
        self.details = details


def wait_until_ready(
    app_names: Sequence[str],
    health_url: str | None,
    say: Callable[[str], None],
    look: Callable[[], None],
) -> None:
    """Return when every application runs and ours answers. `look` is called now and then and may raise."""
    import ray
    from ray import serve

    deadline_s = time.monotonic() + START_TIMEOUT_S
    room = ResourceWatch(say, START_TIMEOUT_S if os.environ.get("RAY_ADDRESS") else OWN_CLUSTER_LIMIT_S)
    next_look_s = 0.0
    while True:
        applications = serve.status().applications
        states = [applications[name] for name in app_names if name in applications]
        for state in states:
            if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                text = _messages(state)
                raise StartError(reason_in(text), text)
        is_running = len(states) == len(app_names) and all(state.status == "RUNNING" for state in states)
        if is_running and (health_url is None or answers(health_url)):
            return
        if time.monotonic() > next_look_s:
            room.look(_without_room(app_names))
            look()
            next_look_s = time.monotonic() + 1.0
        if time.monotonic() > deadline_s:
            logs = ray.get_runtime_context().get_session_name()
            raise StartError(f"it is not ready after {START_TIMEOUT_S:g} s; Ray's session {logs} has the logs")
        time.sleep(STATUS_INTERVAL_S)


def reason_in(text: str) -> str:
    """The line of a traceback, or of several, that names the cause: the last exception that is not a wrapper."""
    found: list[tuple[str, str]] = _RAISED.findall(text)
    raised = [(kind, message.strip()) for kind, message in found if kind.endswith("Error") or hasattr(errors, kind)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = (
        [message for kind, message in raised if kind not in _WRAPPERS]
        or [message for _, message in raised]
        or lines[:1]
    )
    return reasons[-1] if reasons else "Serve gives no reason"


def check_actors(made: Sequence[tuple[str, Any]]) -> None:
    """made: (name, reference that resolves when it exists). Raises StartError if one could not be created."""
    import ray
    from ray.exceptions import RayError

    for what, is_there in made:
        if ray.wait([is_there], timeout=0)[0]:
            try:
                ray.get(is_there)
            except RayError as error:
                raise StartError(f"{what}: {reason_in(str(error))}", str(error)) from error


def check_ha_proxy(folder: Path) -> None:
    """folder: HAProxy's on this node. Raises StartError if HAProxy fails repeatedly."""
    path = folder / "failures"
    failures = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if len(failures) >= MAX_HA_PROXY_FAILURES:
        raise StartError(f"HAProxy exits repeatedly: {failures[-1]}", "\n".join(failures))


def answers(health_url: str) -> bool:
    """Whether a client gets an answer: an application may run before the proxies know it."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(health_url, timeout=30) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def no_room(
    machines: Mapping[str, Mapping[str, float]], actors: Sequence[ActorLocation], app_names: Sequence[str]
) -> str | None:
    """Why replicas of these applications cannot be placed, or None. machines: node id -> its total resources."""
    free = {node_id: Counter(has) for node_id, has in machines.items()}
    for actor in actors:
        if actor.node_id in free:
            free[actor.node_id].subtract(actor.resources)
    waiting = Counter(
        (deployment, tuple(sorted(actor.resources.items())))
        for actor in actors
        if actor.node_id is None
        and (deployment := _deployment(actor.name, app_names)) is not None
        and not any(_fits(actor.resources, available) for available in free.values())
    )
    if not waiting:
        return None
    wants = [
        f"{count} of {name} ({_amounts(dict(request))} each)" for (name, request), count in sorted(waiting.items())
    ]
    kinds = sorted({kind for _, request in waiting for kind, _ in request})
    has = [_amounts({kind: node.get(kind, 0.0) for kind in kinds}) for node in machines.values()]
    return (
        f"Ray cannot place {', '.join(wants)}; there is {_list_of(has, 'on a machine')}, used by "
        f"{_holders(actors, kinds, app_names) or 'no actor'}. Request less (ray_actor_options under deployments: in "
        "the configuration), run fewer replicas, or add machines"
    )


class ResourceWatch:
    """Reports a shortage once, and gives up after `limit_s`."""

    def __init__(self, say: Callable[[str], None], limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._limit_s = limit_s
        self._clock = clock
        self._since_s: float | None = None
        self._reported: str | None = None

    def look(self, sentence: str | None) -> None:
        """`sentence`: the current answer of `no_room`. Raises EngineFailure with it after a shortage of `limit_s`."""
        if sentence is None:
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = self._clock()
        waited_s = self._clock() - self._since_s
        if waited_s >= self._limit_s:
            raise EngineFailure(f"the service does not start: {sentence}")
        if waited_s >= PATIENCE_S and sentence != self._reported:
            self._reported = sentence
            self._say(sentence)


class ReplicaWatch:
    """Reports lost and recovered replicas. `say` gets a line; `clock` gives seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._running: dict[str, int] = {}
        self._lost: dict[str, tuple[int, float]] = {}  # by deployment: number before, and time of the loss

    def look(self, deployments: Mapping[str, tuple[str, int]]) -> None:
        """deployments: name -> (Serve's status, number of running replicas)."""
        for name, (doing, now) in deployments.items():
            before = self._running.get(name, 0)
            self._running[name] = now
            if now < before and doing not in ON_PURPOSE:
                self._lost.setdefault(name, (before, self._clock()))
                self._say(f"{before - now} of {before} {name} lost; Serve starts another")
            elif name in self._lost and now >= self._lost[name][0]:
                _, since_s = self._lost.pop(name)
                self._say(f"{now} {name} running again after {self._clock() - since_s:.0f} s")


def deployments_of(applications: Iterable[Any]) -> dict[str, tuple[str, int]]:
    """The argument of `ReplicaWatch.look`, from Serve's status of applications."""
    return {
        title: (deployment.status.value, replica_counts(deployment).get("RUNNING", 0))
        for application in applications
        for title, deployment in application.deployments.items()
    }


def replica_counts(deployment: Any) -> dict[str, int]:
    """Number of replicas by state. Serve's type says that states are enum members; over Ray they arrive as names."""
    return {getattr(state, "value", state): number for state, number in deployment.replica_states.items()}


def _without_room(app_names: Sequence[str]) -> str | None:
    """The shortage of this cluster as a sentence, or None."""
    import ray

    from app.deployments.rpc.ray_private import actor_locations

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    machines = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    return no_room(machines, actor_locations(), app_names)


def _messages(state: Any) -> str:
    messages = [deployment.message for deployment in state.deployments.values() if deployment.message]
    return "\n".join([state.message, *messages]).strip()


def _deployment(actor_name: str, app_names: Sequence[str]) -> str | None:
    """The deployment of a replica's actor name, SERVE_REPLICA::application#deployment#id; None for other actors."""
    parts = actor_name.removeprefix("SERVE_REPLICA::").split("#")
    return parts[1] if len(parts) == 3 and parts[0] in app_names else None


def _fits(request: Mapping[str, float], available: Mapping[str, float]) -> bool:
    return all(available.get(kind, 0.0) + _LEAST / 2 >= amount for kind, amount in request.items())


def _holders(actors: Iterable[ActorLocation], kinds: Sequence[str], app_names: Sequence[str]) -> str:
    """Which actors use how much of these resources."""
    amounts_of: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for actor in actors:
        amounts = {kind: actor.resources[kind] for kind in kinds if actor.resources.get(kind)}
        if actor.node_id is not None and amounts:
            name = _deployment(actor.name, app_names) or actor.name
            counts[name] += 1
            amounts_of.setdefault(name, Counter()).update(amounts)
    return ", ".join(f"{counts[name]} of {name} ({_amounts(amounts_of[name])} together)" for name in sorted(amounts_of))


def _amounts(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{round(amount, 4):g} {kind}" for kind, amount in sorted(amounts.items())) or "nothing"


def _list_of(has: Sequence[str], where: str) -> str:
    counts = Counter(has)
    return ", ".join(f"{one} {where}" if n == 1 else f"{one} on each of {n} machines" for one, n in counts.items())
