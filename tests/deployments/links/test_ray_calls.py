"""Lost actors and lost objects have one error; what a callee raised stays what it was."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfMemoryError,
    OwnerDiedError,
    RayTaskError,
    WorkerCrashedError,
)

from app.deployments.links.published import Version
from app.deployments.links.ray_calls import ActorAway, NamedActor, held
from app.deployments.links.watched import ServePlacer, Watched
from app.engine.errors import NotReady

LOST = [
    ActorDiedError(),
    ActorUnavailableError("gone", b"0" * 16),
    GetTimeoutError("late"),
    LocalRayletDiedError(),
    NodeDiedError("node"),
    ObjectLostError("00" * 28, None, ""),
    OwnerDiedError("00" * 28, None, ""),
    OutOfMemoryError("killed"),
    WorkerCrashedError(),
]


class Scripted(NamedActor):
    """Answers as it is told: raises what is an exception, else returns it; waits when there is nothing left."""

    def __init__(self, *answers: Any) -> None:
        super().__init__("scripted", object)
        self.answers = list(answers)
        self.num_handles = 0

    def _actor(self) -> Any:
        if self._handle is None:
            self.num_handles += 1
            self._handle = self
        return self

    @property
    def watch(self) -> Any:
        return self

    assign = gone = watch

    async def remote(self, *_: Any) -> Any:
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("watch", "the remote traceback", cause)


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_whatever_is_lost_the_next_call_looks_for_the_actor_again(error: Exception) -> None:
    actor = Scripted(error, "here")
    with pytest.raises(ActorAway, match=type(error).__name__):
        await actor.call("watch")
    assert await actor.call("watch") == "here"
    assert actor.num_handles == 2


@pytest.mark.parametrize("cause", [NotReady("not yet"), ObjectStoreFullError("full"), ValueError("a bug")])
async def test_what_the_callee_raised_is_raised_and_its_handle_is_kept(cause: Exception) -> None:
    actor = Scripted(raised(cause), "here")
    with pytest.raises(type(cause)) as caught:
        await actor.call("watch")
    assert caught.value is cause
    assert await actor.call("watch") == "here"
    assert actor.num_handles == 1


async def test_a_lost_object_is_said_to_be() -> None:
    async def lost() -> None:
        raise OwnerDiedError("00" * 28, None, "")

    with pytest.raises(ActorAway, match="OwnerDiedError"):
        await held(lost())


@pytest.mark.parametrize(
    "error", [*LOST, raised(NotReady("the database does not answer"))], ids=lambda error: type(error).__name__
)
async def test_a_follower_outlives_every_loss(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.deployments.links.watched.AWAY_S", 0.0)
    news = [(Version("a life", number), str(number)) for number in range(3)]
    watched: Watched[str] = Watched(Scripted(news[0], error, error, news[1], None, news[2]), "me", "")
    following = asyncio.create_task(watched.follow())
    while watched.value != "2":
        assert not following.done()
        await asyncio.sleep(0)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_placement_that_has_just_started_leaves_the_last_table() -> None:
    watched: Watched[str] = Watched(Scripted(), "me", "the last table")
    await ServePlacer(Scripted(raised(NotReady("just started"))), watched).assign(["digest"])  # type: ignore[arg-type]
    assert watched.value == "the last table"


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_placement_that_is_lost_costs_no_request(error: Exception) -> None:
    watched: Watched[str] = Watched(Scripted(), "me", "the last table")
    placer = ServePlacer(Scripted(error, error), watched)  # type: ignore[arg-type]
    await placer.assign(["digest"])
    await placer.gone("replica")
    assert watched.value == "the last table"
