"""What requests hear when a registered adapter cannot be read: that it is so, and for how long; not where it lay."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from app.deployments.ingress.error_responses import error_reply
from app.deployments.registry.jobs.failure_backoff import FIRST_S
from app.deployments.store.service import StoreService
from app.engine.adapters.card import AdapterRef
from app.engine.errors import (
    AdapterFormatError,
    AdapterMismatch,
    AdapterQuarantined,
    AdapterUnreadable,
    NotFound,
    NotReady,
    PolyloraError,
    SourceError,
)

REF = AdapterRef("sql", "d" * 64, "acme")


class Failing:
    """Bytes whose reading raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def try_fetch(self, ref: AdapterRef, wait_s: float, *, again: bool = False) -> None:  # noqa: ARG002
        raise self.error


def service(error: Exception) -> StoreService[Any]:
    parts: Any = SimpleNamespace(registry=None, registry_service=None, host_cache=Failing(error), uploads=None)
    return StoreService(parts, lambda: None)


@pytest.mark.parametrize("kind", [NotFound, AdapterFormatError, AdapterMismatch, SourceError])
async def test_whatever_reading_raises_is_a_503_without_its_place(
    kind: type[PolyloraError], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app")
    with pytest.raises(AdapterUnreadable) as caught:
        await service(kind("nothing at /secret/place")).fetch(REF)
    answer = error_reply(caught.value)
    assert (answer.status, answer.headers["Retry-After"]) == (503, str(int(FIRST_S)))
    assert answer.body["error"]["code"] == "adapter_unreadable"
    assert "/secret/place" not in answer.body["error"]["message"]
    assert "GET /v1/loras/sql" in answer.body["error"]["message"]
    (record,) = caplog.records
    assert "adapter cannot be read name=sql tenant=acme" in record.getMessage()
    assert "/secret/place" in record.getMessage()


async def test_one_that_failed_before_is_no_line_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "app")
    with pytest.raises(AdapterUnreadable, match="tried again in 41 s") as caught:
        await service(AdapterQuarantined("failed: /secret", retry_after_s=40.2)).fetch(REF)
    assert caught.value.retry_after_s == 40.2
    assert caplog.records == []


@pytest.mark.parametrize("error", [NotReady("the database is away"), KeyError("a bug")])
async def test_other_trouble_is_left_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        await service(error).fetch(REF)
    assert caught.value is error
