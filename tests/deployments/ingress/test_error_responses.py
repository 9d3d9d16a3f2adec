"""What OpenAI's own client makes of an error: whether it sends the request again by itself."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from app.deployments.ingress.error_responses import error_reply
from app.engine import errors


@pytest.mark.parametrize(
    ("error", "status", "is_repeated"),
    [
        (errors.EngineFailure("given up"), 500, False),
        (errors.DeadlineExceeded("too long"), 504, False),
        (errors.AdapterBusy("an alias uses it"), 409, False),
        (errors.AdapterUnloaded("unloaded meanwhile"), 409, False),
        (errors.InvalidRequest("wrong"), 400, False),
        (errors.QueueFull("too many", retry_after_s=0.5), 429, True),
        (errors.NotReady("no replica", retry_after_s=0.5), 503, True),
        (errors.SourceError("the hub is away"), 502, True),
    ],
)
async def test_the_client_repeats_what_may_help(
    error: errors.PolyloraError, status: int, is_repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_requests = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal num_requests
        num_requests += 1
        said = error_reply(error)
        return httpx.Response(said.status, headers=said.headers, content=json.dumps(said.body))

    monkeypatch.setattr(openai.AsyncOpenAI, "_calculate_retry_timeout", lambda *_: 0.0)  # else it waits for seconds
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=2)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="base", prompt="hi")
    assert caught.value.status_code == status
    assert num_requests == (3 if is_repeated else 1)


@pytest.mark.parametrize(
    "error",
    [
        errors.AdapterReadFailed("its reader was killed for memory"),
        errors.AdapterWriteFailed("its rows did not reach the device"),
        errors.AdapterUnreadable("its files are gone", retry_after_s=30.0),
        errors.AdapterQuarantined("it failed a moment ago", retry_after_s=30.0),
        errors.AdapterPoolFull("pinned adapters have all rows"),
        errors.ServerOverloaded("no room"),
        errors.NotReady("no replica"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_trouble_of_the_machine_is_not_told_as_the_client_s_fault(error: errors.PolyloraError) -> None:
    said = error_reply(error)
    assert said.status == 503
    assert said.body["error"]["type"] == "server_error"
    assert int(said.headers["Retry-After"]) >= 1
    assert "X-Should-Retry" not in said.headers
