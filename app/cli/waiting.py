"""From "it is being started" to "it answers", or to the sentence that says why it does not.

In: the names of applications, and where the service's health is asked. Out: nothing once every application runs and
ours answers; EngineFailure with one line otherwise. Rule: what cannot get better is told when it is known, not when the
patience is over: an application that Serve has given up, an actor that could not be made, a HAProxy that ends again
and again, replicas that fit on no machine.
"""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.cli.room import OWN_CLUSTER_LIMIT_S, Actor, RoomWatch, no_room
from app.engine import errors
from app.engine.errors import EngineFailure

#: A first start compiles kernels for most of a minute; a large model takes its time to load.
START_TIMEOUT_S = 900.0
#: HAProxy is started again by Serve; after so many ends that begin with the same words nothing will change.
MAX_HA_PROXY_FAILURES = 3

#: The last line of a traceback: an exception's class, with or without its module, and what it says.
_RAISED = re.compile(r"^\s*(?:[a-zA-Z_][\w.]*\.)?([A-Z]\w+): (\S.*)$", re.MULTILINE)
#: Classes that tell of another one's end, and not why.
_TELLERS = ("RayTaskError", "RuntimeError", "ActorDiedError", "RayActorError")


class StartFailed(EngineFailure):
    """The service does not start; `details` is all that Ray or Serve say of it."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(f"the service does not start: {message}")
        self.details = details


def wait_until_ready(
    app_names: Sequence[str],
    health_url: str | None,
    say: Callable[[str], None],
    look: Callable[[], None],
) -> None:
    """Return when every application runs and ours answers. `look` is called now and then; what it raises ends this."""
    import ray
    from ray import serve

    deadline_s = time.monotonic() + START_TIMEOUT_S
    room = RoomWatch(say, START_TIMEOUT_S if os.environ.get("RAY_ADDRESS") else OWN_CLUSTER_LIMIT_S)
    next_look_s = 0.0
    while True:
        applications = serve.status().applications
        states = [applications[name] for name in app_names if name in applications]
        for state in states:
            if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                words = _last_words(state)
                raise StartFailed(reason_in(words), words)
        is_running = len(states) == len(app_names) and all(state.status == "RUNNING" for state in states)
        if is_running and (health_url is None or answers(health_url)):
            return
        if time.monotonic() > next_look_s:
            room.look(_without_room(app_names))
            look()
            next_look_s = time.monotonic() + 1.0
        if time.monotonic() > deadline_s:
            logs = ray.get_runtime_context().get_session_name()
            raise StartFailed(f"it is not ready after {START_TIMEOUT_S:g} s; Ray's session {logs} has the logs")
        time.sleep(0.1)


def reason_in(words: str) -> str:
    """The one line of a traceback, or of several, that says why: the last exception that tells of itself."""
    found: list[tuple[str, str]] = _RAISED.findall(words)
    raised = [(kind, said.strip()) for kind, said in found if kind.endswith("Error") or hasattr(errors, kind)]
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    told = [said for kind, said in raised if kind not in _TELLERS] or [said for _, said in raised] or lines[:1]
    return told[-1] if told else "Serve does not say why"


def check_actors(made: Sequence[tuple[str, Any]]) -> None:
    """made: (what it is, what Ray answers when it is there). Raises StartFailed if one of them could not be made."""
    import ray
    from ray.exceptions import RayError

    for what, is_there in made:
        if ray.wait([is_there], timeout=0)[0]:
            try:
                ray.get(is_there)
            except RayError as error:
                raise StartFailed(f"{what}: {reason_in(str(error))}", str(error)) from error


def check_ha_proxy(folder: Path) -> None:
    """folder: HAProxy's, with one inside for each node. Raises StartFailed if it ends as often as it is started."""
    for path in folder.glob("*/failures"):
        failures = path.read_text(encoding="utf-8").splitlines()
        if len(failures) >= MAX_HA_PROXY_FAILURES:
            raise StartFailed(f"HAProxy ends again and again: {failures[-1]}", "\n".join(failures))


def answers(health_url: str) -> bool:
    """The way a client comes: an application may run before the proxies know of it."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(health_url, timeout=30) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _without_room(app_names: Sequence[str]) -> str | None:
    """Which replicas fit on no machine of the cluster, as a sentence."""
    import ray

    from app.deployments.links.ray_private import actor_places

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    machines = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    actors = [Actor(place.name, place.resources, place.node_id or None) for place in actor_places()]
    return no_room(machines, actors, app_names)


def _last_words(state: Any) -> str:
    messages = [deployment.message for deployment in state.deployments.values() if deployment.message]
    return "\n".join([state.message, *messages]).strip()
