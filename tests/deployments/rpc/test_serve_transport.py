"""Frames that come through Ray: the same as were sent, and a call that is given up is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from app.deployments.rpc import frames as frames_module
from app.deployments.rpc.frames import pack_frame
from app.deployments.rpc.serve_transport import ServeTransport
from app.deployments.rpc.transport import PROTOCOL, ReplicaGone, ReplicaUnreachable
from app.deployments.rpc.uds_transport import FOLDER_VARIABLE
from app.engine.request import TokenChunk

CHUNK = TokenChunk("a/1", (5,))


class Engines:
    """The handle of a deployment whose one replica sends two frames, and then nothing."""

    def __init__(self, end: RayActorError | None = None) -> None:
        """`end`: what the caller gets after the two frames."""
        self._end = end
        self.asked: list[tuple[Any, ...]] = []
        self.is_cancelled = False

    @property
    def frames(self) -> Engines:
        return self

    def options(self, *, stream: bool) -> Engines:
        assert stream
        return self

    def remote(self, *args: Any, **options: Any) -> Engines:
        self.asked.append((*args, options))
        self._items = self._send()
        return self

    def cancel(self) -> None:
        self.is_cancelled = True

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._items

    async def __anext__(self) -> bytes:
        return await anext(self._items)

    async def _send(self) -> AsyncIterator[bytes]:
        yield pack_frame([])
        yield pack_frame([CHUNK])
        if self._end is not None:
            raise self._end
        await asyncio.Event().wait()


async def test_a_call_on_which_nothing_comes_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "sockets"))
    monkeypatch.setattr(frames_module, "HEARTBEAT_S", 0.005)
    engines = Engines()
    frames = ServeTransport(engines).frames("replica", "link")  # type: ignore[arg-type]
    assert [await anext(frames), await anext(frames)] == [[], [CHUNK]]
    assert engines.asked == [("link", False, {"protocol": PROTOCOL, "target_replica_id": "replica"})]
    assert not engines.is_cancelled
    with pytest.raises(ReplicaUnreachable, match="no heartbeat of the replica"):
        await anext(frames)
    assert engines.is_cancelled


@pytest.mark.parametrize(
    ("end", "raised", "is_cancelled"),
    [
        (ActorUnavailableError("no connection", None), ReplicaUnreachable, True),
        (ActorDiedError(), ReplicaGone, False),
    ],
)
async def test_only_a_replica_that_has_died_is_gone(
    end: RayActorError, raised: type[Exception], is_cancelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request on four replicas that died is refused as the cause; lost connections must not add up to that."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "sockets"))
    engines = Engines(end)
    frames = ServeTransport(engines).frames("replica", "link")  # type: ignore[arg-type]
    assert [await anext(frames), await anext(frames)] == [[], [CHUNK]]
    with pytest.raises(raised, match=type(end).__name__):
        await anext(frames)
    assert engines.is_cancelled is is_cancelled
