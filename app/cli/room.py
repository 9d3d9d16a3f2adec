"""What Ray has no room for, in a sentence that an operator can act on.

In: the machines of a cluster and the actors on them or on their way to one, as Ray lists them. Out: a sentence, or None
where everything that waits fits on some machine and is only starting. Everything here is arithmetic: Ray is asked by
`app.deployments.links.ray_private`. What tasks and placement groups of other jobs hold is not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.engine.errors import EngineFailure

#: Ray counts in ten-thousandths.
_LEAST = 1e-4
#: Something that waits for so long is told: Ray needs less to place what it has room for.
PATIENCE_S = 5.0
#: In a cluster of our own nothing changes any more; the command ends after so long.
OWN_CLUSTER_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Actor:
    """A living actor, by its Ray name; `node_id` is None while it waits for a place."""

    name: str
    resources: Mapping[str, float]
    node_id: str | None


def no_room(
    machines: Mapping[str, Mapping[str, float]], actors: Sequence[Actor], app_names: Sequence[str]
) -> str | None:
    """What keeps replicas of these applications waiting. machines: node id -> what it has in all."""
    free = {node_id: Counter(has) for node_id, has in machines.items()}
    for actor in actors:
        if actor.node_id in free:
            free[actor.node_id].subtract(actor.resources)
    waiting = Counter(
        (deployment, tuple(sorted(actor.resources.items())))
        for actor in actors
        if actor.node_id is None
        and (deployment := _deployment(actor.name, app_names)) is not None
        and not any(_fits(actor.resources, left) for left in free.values())
    )
    if not waiting:
        return None
    wants = [f"{count} of {name} ({_told(dict(asked))} each)" for (name, asked), count in sorted(waiting.items())]
    kinds = sorted({kind for _, asked in waiting for kind, _ in asked})
    has = [_told({kind: node.get(kind, 0.0) for kind in kinds}) for node in machines.values()]
    return (
        f"Ray has no room for {', '.join(wants)}; there is {_listed(has, 'on a machine')}, held by "
        f"{_holders(actors, kinds, app_names) or 'nobody'}. Ask for less (ray_actor_options under deployments: in the "
        "configuration), run fewer replicas, or add machines"
    )


class RoomWatch:
    """Tells what has no room, once, and gives up after `limit_s`."""

    def __init__(self, say: Callable[[str], None], limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._limit_s = limit_s
        self._clock = clock
        self._since_s: float | None = None
        self._told: str | None = None

    def look(self, sentence: str | None) -> None:
        """`sentence`: of `no_room`, now. Raises EngineFailure with it when there has been one for `limit_s`."""
        if sentence is None:
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = self._clock()
        waited_s = self._clock() - self._since_s
        if waited_s >= self._limit_s:
            raise EngineFailure(f"the service does not start: {sentence}")
        if waited_s >= PATIENCE_S and sentence != self._told:
            self._told = sentence
            self._say(sentence)


def _deployment(actor_name: str, app_names: Sequence[str]) -> str | None:
    """Of a replica of one of these applications: Serve names it SERVE_REPLICA::application#deployment#id."""
    words = actor_name.removeprefix("SERVE_REPLICA::").split("#")
    return words[1] if len(words) == 3 and words[0] in app_names else None


def _fits(asked: Mapping[str, float], left: Mapping[str, float]) -> bool:
    return all(left.get(kind, 0.0) + _LEAST / 2 >= amount for kind, amount in asked.items())


def _holders(actors: Iterable[Actor], kinds: Sequence[str], app_names: Sequence[str]) -> str:
    """Who holds what of these kinds."""
    held: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for actor in actors:
        amounts = {kind: actor.resources[kind] for kind in kinds if actor.resources.get(kind)}
        if actor.node_id is not None and amounts:
            name = _deployment(actor.name, app_names) or actor.name
            counts[name] += 1
            held.setdefault(name, Counter()).update(amounts)
    return ", ".join(f"{counts[name]} of {name} ({_told(held[name])} together)" for name in sorted(held))


def _told(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{round(amount, 4):g} {kind}" for kind, amount in sorted(amounts.items())) or "nothing"


def _listed(has: Sequence[str], where: str) -> str:
    counts = Counter(has)
    return ", ".join(f"{one} {where}" if n == 1 else f"{one} on each of {n} machines" for one, n in counts.items())
