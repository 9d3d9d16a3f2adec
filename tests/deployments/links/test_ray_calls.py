"""Lost actors and lost objects have one error; what a callee raised stays what it was."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ObjectStoreFullError, OwnerDiedError

from app.deployments.links.published import Version
from app.deployments.links.ray_calls import ActorAway, held
from app.deployments.links.watched import Watched
from app.engine.errors import NotReady
from tests.deployments.scripted_actor import LOST, Scripted, raised


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_whatever_is_lost_the_next_call_looks_for_the_actor_again(error: Exception) -> None:
    actor = Scripted(error, "here")
    with pytest.raises(ActorAway, match=type(error).__name__):
        await actor.ask()
    assert await actor.ask() == "here"
    assert actor.num_handles == 2


@pytest.mark.parametrize("cause", [NotReady("not yet"), ObjectStoreFullError("full"), ValueError("a bug")])
async def test_what_the_callee_raised_is_raised_and_its_handle_is_kept(cause: Exception) -> None:
    actor = Scripted(raised(cause), "here")
    with pytest.raises(type(cause)) as caught:
        await actor.ask()
    assert caught.value is cause
    assert await actor.ask() == "here"
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
    actor = Scripted(news[0], error, error, news[1], None, news[2])
    watched: Watched[str] = Watched(lambda *_: actor.ask(), "me", "")
    following = asyncio.create_task(watched.follow())
    while watched.value != "2":
        assert not following.done()
        await asyncio.sleep(0)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
