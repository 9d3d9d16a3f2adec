"""Streams that come together are assigned together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from ray import serve

from app.deployments.ingress.deployment import ServeBatcher
from app.deployments.ingress.dispatch.stream import Stream
from tests.fakes import fake_request


class Noting:
    """An router that takes a note of what comes together."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def assign(self, streams: Sequence[Stream]) -> None:
        self.batches.append([stream.request.request_id for stream in streams])


async def test_one_batch_for_those_that_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=9))
    monkeypatch.setattr(serve, "get_replica_context", lambda: deployment)
    router = Noting()
    batcher = ServeBatcher(router)  # type: ignore[arg-type]
    streams = [Stream(fake_request(f"r{index}", [1])) for index in range(3)]
    await asyncio.gather(*map(batcher.assign, streams))
    assert router.batches == [["r0", "r1", "r2"]]
    await batcher.assign(streams[1])
    assert router.batches[1:] == [["r1"]]
