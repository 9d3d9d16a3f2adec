"""Requests that make no sense: each is answered, none with a 500, none hangs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.budgets import examples
from tests.e2e.service.conftest import Service

ROUTES = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"model": "r8", "prompt": "hi", "max_tokens": 2},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    "/v1/load_lora_adapter": {"lora_name": "odd", "lora_path": "nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "odd"},
    "/v1/loras": {"name": "odd", "path": "nowhere"},
}
FIELDS = [
    "model", "messages", "prompt", "text", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "stream",
    "logprobs", "top_logprobs", "stream_options", "lora_path", "logit_bias", "tools", "sampling_params", "lora_name",
    "name", "path", "stop_token_ids", "repetition_penalty", "min_p", "response_format", "role", "nonsense",
]  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20)
    | st.sampled_from(["tiny", "r8", "tiny:r8", "../r8", "\ud800", "\0", "user", "x" * 500])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def malformed(draw: st.DrawFn) -> tuple[str, bytes]:
    """A valid request with some fields replaced, or any JSON, or any bytes."""
    route = draw(st.sampled_from(sorted(ROUTES)))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return route, draw(st.binary(max_size=200))
    if kind == 1:
        return route, json.dumps(draw(values)).encode()
    body: dict[str, Any] = dict(ROUTES[route])
    for name in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)):
        body[name] = draw(values)
    text = json.dumps(body)
    return route, text[: draw(st.integers(0, len(text)))].encode() if kind == 2 else text.encode()


@given(request=malformed())
@settings(max_examples=examples(300), deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_malformed_requests_are_answered(http: httpx.Client, request: tuple[str, bytes]) -> None:
    route, content = request
    answer = http.post(route, content=content, headers={"content-type": "application/json"})
    expected = {200, 201, 400, 403, 404, 413} | ({202} if route == "/v1/loras" else set())  # 202: a job was begun
    assert answer.status_code in expected, (route, content, answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def http(service: Service) -> Any:
    with service.http() as client:
        yield client
    assert httpx.get(f"{service.url}/health", timeout=60).status_code == 200, "and the service is still well"


def test_other_malformed_things(service: Service) -> None:
    with service.http() as http:
        assert http.post("/v1/completions", content=b"[" * 100_000).status_code == 400
        assert http.post("/v1/completions", content=b'{"a":' * 30_000 + b"1" + b"}" * 30_000).status_code == 400
        assert http.post("/v1/completions", content=b'{"model":"tiny","model":"r8","prompt":"x"}').status_code == 400
        assert (
            http.post(
                "/v1/completions", content=b'{"model":"tiny","prompt":"x","seed":' + b"9" * 5000 + b"}"
            ).status_code
            == 400
        )
        too_long = http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 300_000})
        assert too_long.status_code == 413
        assert http.get("/v1/completions").status_code == 405
        assert http.get("/nowhere").json()["error"]["code"] == "no_route"
        long_prompt = http.post("/v1/completions", json={"model": "tiny", "prompt": "lazy dog " * 5000})
        assert long_prompt.status_code == 400
        assert "1024" in long_prompt.json()["error"]["message"]
        many = http.post("/v1/completions", json={"model": "tiny", "prompt": ["x"] * 33, "n": 2})
        assert many.status_code == 400
        assert many.json()["error"]["param"] == "n"
