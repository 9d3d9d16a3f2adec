"""Requests are counted once, and times of tokens are those of the answer."""

from __future__ import annotations

import pytest

from app.deployments.ingress import metrics as exported
from app.deployments.ingress.metrics import IngressMetrics
from app.engine.request import Usage
from tests.deployments.recorded import record


def test_a_client_that_left_is_neither_an_answer_nor_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told = record(monkeypatch, exported, ("Counter", "Histogram"))
    metrics = IngressMetrics(lambda: 110.0)
    for status, expected in ((200, "2xx"), (404, "4xx"), (499, "499"), (503, "5xx")):
        told.clear()
        usages = [Usage(5, 4, 3), None]
        metrics.request("chat", status, arrival_s=1.0, first_s=None, is_adapter=True, usages=usages)
        assert ("polylora_requests", 1, {"route": "chat", "status": expected, "kind": "adapter"}) in told
        assert ("polylora_completion_tokens", 3, {"kind": "adapter"}) in told, "computed is computed"
        assert ("polylora_request_seconds" in {name for name, *_ in told}) == (status != 499), "there was no last token"


def test_times_of_tokens_are_those_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told = record(monkeypatch, exported, ("Histogram",))
    metrics = IngressMetrics(lambda: 110.0)
    several = [Usage(5, 4, 11), Usage(5, 4, 21)]
    metrics.request("chat", 200, arrival_s=100.0, first_s=102.0, is_adapter=False, usages=several)
    metrics.request("chat", 200, arrival_s=100.0, first_s=103.0, is_adapter=False, usages=[Usage(5, 4, 1)])
    metrics.request("chat", 499, arrival_s=100.0, first_s=104.0, is_adapter=False, usages=several)
    metrics.request("chat", 400, arrival_s=None, first_s=None, is_adapter=False, usages=[])
    assert [value for name, value, _ in told if name == "polylora_time_to_first_token_seconds"] == [2.0, 3.0, 4.0]
    assert [value for name, value, _ in told if name == "polylora_time_per_output_token_seconds"] == [8.0 / 20]
    assert all(tags == {"route": "chat"} for _, _, tags in told)
