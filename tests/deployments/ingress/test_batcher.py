"""Streams that come together are assigned together, and each hears of its own refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from ray import serve

from app.deployments.ingress.batcher import ServeBatcher
from app.deployments.ingress.streams import Stream
from app.engine.errors import QueueFull
from tests.fakes import fake_request


class Refusing:
    """An assigner that refuses what is named in `full`."""

    def __init__(self, *full: str) -> None:
        self.full = full
        self.batches: list[list[str]] = []

    async def assign(self, streams: Sequence[Stream]) -> list[Exception | None]:
        self.batches.append([stream.request.request_id for stream in streams])
        return [QueueFull("no room") if stream.request.request_id in self.full else None for stream in streams]


async def test_one_batch_for_those_that_come_together_and_to_each_its_own_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=9))
    monkeypatch.setattr(serve, "get_replica_context", lambda: deployment)
    assigner = Refusing("r1")
    batcher = ServeBatcher(assigner)  # type: ignore[arg-type]
    streams = [Stream(fake_request(f"r{index}", [1])) for index in range(3)]
    results = await asyncio.gather(*map(batcher.assign, streams), return_exceptions=True)
    assert assigner.batches == [["r0", "r1", "r2"]]
    assert [type(result) for result in results] == [type(None), QueueFull, type(None)]
    with pytest.raises(QueueFull, match="no room"):
        await batcher.assign(streams[1])
    assert len(assigner.batches) == 2
