"""News of the service's actors: what was last heard stands while they, or what they need, are away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.deployments.published import Version
from app.deployments.ray_calls import ActorAway
from app.deployments.watching import Watched
from app.engine.errors import NotReady


class Actor:
    """Answers each call with the next of `answers`, then never again."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    async def call(self, *_: object) -> Any:
        if not self._answers:
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("error", [ActorAway("it does not answer"), NotReady("the database does not answer")])
async def test_whoever_follows_outlives_what_is_away(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr("app.deployments.watching.AWAY_S", 0.001)
    actor: Any = Actor((Version("epoch", 1), "first"), error, error, (Version("epoch", 2), "second"))
    watched = Watched(actor, "watcher", "nothing")
    following = asyncio.create_task(watched.follow())
    while watched.value != "second":
        assert not following.done()
        await asyncio.sleep(0.001)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
