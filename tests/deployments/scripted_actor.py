"""A named actor that answers as a test says, and every way in which Ray says that an actor is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayTaskError,
    WorkerCrashedError,
)

from app.deployments.placement.actor import PlacementActor
from app.deployments.rpc.named_actor import NamedActor

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

    def _look_up(self) -> Any:
        self.num_handles += 1
        return self

    @property
    def watch(self) -> Any:
        return self

    assign = report_unreachable = watch

    def ask(self) -> Any:
        """What `call` is given; its name is one of those above."""
        return self.call(PlacementActor.watch, None, "me", 10.0)

    async def remote(self, *_: Any) -> Any:
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("watch", "the remote traceback", cause)
