"""Lost actors and lost objects have one error; what a callee raised stays what it was."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, ObjectStoreFullError, OwnerDiedError

from app.deployments.rpc import named_actor
from app.deployments.rpc.actor_unavailable import ActorUnavailable, UnavailableLog
from app.deployments.rpc.long_poll_client import LongPollValue
from app.deployments.rpc.long_poll_host import Version
from app.deployments.rpc.named_actor import FoundActor, get_object
from app.deployments.rpc.transport import PROTOCOL
from app.engine.errors import ConfigError, NotReady
from tests.deployments.scripted_actor import LOST, Scripted, raised


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_whatever_is_lost_the_next_call_looks_for_the_actor_again(error: Exception) -> None:
    actor = Scripted(error, "here")
    with pytest.raises(ActorUnavailable, match=type(error).__name__):
        await actor.ask()
    assert await actor.ask() == "here"
    assert actor.num_handles == (1 if isinstance(error, ActorUnavailableError) else 2), "out of reach is not gone"


async def test_an_absence_is_told_once_however_many_meet_it(caplog: pytest.LogCaptureFixture) -> None:
    away = ActorUnavailableError("away", None)
    actor = Scripted(away, away, away, None, None)

    async def watch(*_: object) -> None:
        await actor.ask()

    with caplog.at_level(logging.INFO):
        tasks = [asyncio.create_task(LongPollValue(watch, "me", 0).follow()) for _ in range(2)]
        async with asyncio.timeout(60):
            while actor.answers:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first, second = caplog.messages
    assert re.match(r"scripted\S* does not answer \(ActorUnavailableError\)", first)
    assert re.match(r"scripted\S* answers again, after \d", second)


def test_an_absence_that_comes_back_at_once_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    absence = UnavailableLog("store", lambda: now_s)

    def lines() -> list[str]:
        found = [record.getMessage().partition(";")[0] for record in caplog.records]
        caplog.clear()
        return found

    with caplog.at_level(logging.INFO):
        absence.on_recovery()
        now_s = 1.0
        absence.on_error(ActorUnavailable("store is away"))
        absence.on_error(ActorUnavailable("store is away"))
        now_s = 3.0
        absence.on_recovery()
        assert lines() == ["store is away", "store answers again, after 2.0 s"]
        absence.on_error(ActorUnavailable("store is away"))
        absence.on_recovery()
        assert lines() == [], "a call that ended late"
        absence.on_error(ActorUnavailable("store is away"))
        now_s = 11.0
        absence.on_error(ActorUnavailable("store is away"))
        assert lines() == ["store is away"], "it goes on"
        absence.on_recovery()
        assert lines() == ["store answers again, after 8.0 s"]


class Slow(Scripted):
    """An actor whose look-up blocks its thread, as Ray's does while the head node is down."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(*answers)
        self.found = threading.Event()

    def _look_up(self) -> Any:
        assert self.found.wait(60)
        return super()._look_up()


async def test_a_look_up_that_blocks_holds_up_nobody_and_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_actor, "LOOK_UP_TIMEOUT_S", 0.01)
    actor = Slow("here", "and here")
    try:
        for _ in range(3):  # this loop goes on: each wait comes to its end
            with pytest.raises(ActorUnavailable, match="head node may be down"):
                await actor.ask()
    finally:
        actor.found.set()
    monkeypatch.setattr(named_actor, "LOOK_UP_TIMEOUT_S", 60.0)
    assert await asyncio.gather(actor.ask(), actor.ask()) == ["here", "and here"]
    assert actor.num_handles == 1


async def test_a_look_up_that_fails_is_made_again() -> None:
    class Missing(Scripted):
        def _look_up(self) -> Any:
            if super()._look_up().num_handles == 1:
                raise RuntimeError("the GCS is away")
            return self

    actor = Missing("here")
    with pytest.raises(ActorUnavailable, match="the GCS is away"):
        await actor.ask()
    assert await actor.ask() == "here"


def test_actors_of_another_protocol_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(named_actor.ray, "get_actor", lambda name, **_: asked.append(name))
    FoundActor("placement")._look_up()
    monkeypatch.setattr(named_actor, "PROTOCOL", PROTOCOL + 1)
    FoundActor("placement")._look_up()
    assert len(set(asked)) == 2


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

    with pytest.raises(ActorUnavailable, match="OwnerDiedError"):
        await get_object(lost())


@pytest.mark.parametrize(
    "error",
    [*LOST, *map(raised, (NotReady("no database"), ConfigError("damaged"), TypeError("no such argument")))],
    ids=lambda error: type(getattr(error, "cause", error)).__name__,
)
async def test_a_follower_outlives_every_loss(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.deployments.rpc.long_poll_client.RETRY_S", 0.0)
    news = [(Version("a life", number), str(number)) for number in range(3)]
    actor = Scripted(news[0], error, error, news[1], None, news[2])
    watched: LongPollValue[str] = LongPollValue(lambda *_: actor.ask(), "me", "")
    following = asyncio.create_task(watched.follow())
    while watched.value != "2":
        assert not following.done()
        await asyncio.sleep(0)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_a_follower_that_could_not_take_a_table_asks_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.deployments.rpc.long_poll_client.RETRY_S", 0.0)
    asked: list[Version | None] = []
    taken = asyncio.Event()

    async def watch(held: Version | None, *_: Any) -> tuple[Version, str]:
        asked.append(held)
        await asyncio.sleep(0)
        return Version("a life", len(asked)), str(len(asked))

    class Clumsy(LongPollValue[str]):
        def _apply(self, news: str) -> None:
            super()._apply(news)
            if news == "2":
                raise ValueError("half of it is taken")
            if news == "3":
                taken.set()

    following = asyncio.create_task(Clumsy(watch, "me", "").follow())
    async with asyncio.timeout(60):
        await taken.wait()
    following.cancel()
    assert asked[:3] == [None, Version("a life", 1), None]
