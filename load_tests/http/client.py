"""Sends planned requests to an OpenAI endpoint and records when their parts came back.

Returns one `Outcome` per request, failures included; nothing is retried, and each is also passed on when it ends, so
that an aborted run loses only unfinished requests. Open loop: each request leaves at its time, independent of the
others, and its clock starts when it was due, not when a busy client sent it. Closed loop: N streams, each sends its
next request when the last has ended. Only /v1/completions with `stream: true` is used: every compatible server has it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from load_tests.http.workload import PlannedRequest

#: For so long after [DONE] a connection's answer may take to end; one that takes longer is not used again.
_DRAIN_S = 0.05

#: More tokens than any answer has, few enough to be summed and divided.
_MOST_COUNTED = 1 << 40


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` ends in /v1. `api_keys` by tenant; `default_key` for the others. `extra_body` goes into every request."""

    url: str
    default_key: str = "none"
    api_keys: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float = 600.0


@dataclass(slots=True)
class Outcome:
    """One request's life in seconds from the start of the run. `chunk_s` are times of events with new text, or of
    the last one of an answer without any; `error` is None for a complete answer.
    `cached_tokens` of the prompt were, as far as the server says."""

    index: int
    model: str
    tenant: str
    due_s: float
    sent_s: float
    chunk_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Due to first chunk."""
        return self.chunk_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """Due to [DONE]."""
        return self.done_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 for an answer of one token."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(1, self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks: what a reader sees. A chunk may hold several tokens."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


async def open_loop(
    endpoint: Endpoint, requests: Sequence[PlannedRequest], on_end: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Send each request at its `arrival_s`; the outcomes in the order of `requests`."""
    async with _session(endpoint) as session:
        start = time.perf_counter()

        async def one(request: PlannedRequest) -> Outcome:
            await asyncio.sleep(max(0.0, start + request.arrival_s - time.perf_counter()))
            outcome = await _send(session, endpoint, request, start, request.arrival_s)
            on_end(outcome)
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks]


async def closed_loop(
    endpoint: Endpoint,
    requests: Sequence[PlannedRequest],
    num_streams: int,
    on_end: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """`num_streams` at a time, as fast as they are answered; `arrival_s` is ignored."""
    if num_streams < 1:
        raise ValueError(f"{num_streams} streams: at least one is needed")
    async with _session(endpoint) as session:
        start = time.perf_counter()
        left = iter(requests)

        async def stream() -> list[Outcome]:
            own = []
            for request in left:
                outcome = await _send(session, endpoint, request, start, time.perf_counter() - start)
                on_end(outcome)
                own.append(outcome)
            return own

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream()) for _ in range(num_streams)]
    return sorted((outcome for task in tasks for outcome in task.result()), key=lambda outcome: outcome.index)


def answers_s(
    endpoint: Endpoint, models: Sequence[str], prompts: Sequence[str], num_tokens: int, num_streams: int
) -> float:
    """Seconds from the first request to the last token: each prompt to its model, `num_streams` at a time.

    Raises RuntimeError when a request fails, or its answer has not `num_tokens`.
    """
    requests = [
        PlannedRequest(index, 0.0, model, "bench", prompt, num_tokens)
        for index, (model, prompt) in enumerate(zip(models, prompts, strict=True))
    ]
    outcomes = asyncio.run(closed_loop(endpoint, requests, num_streams))
    for outcome in outcomes:
        if outcome.error is not None or outcome.completion_tokens != num_tokens:
            raise RuntimeError(f"{outcome.model}: {outcome.error or f'{outcome.completion_tokens} tokens'}")
    return max(outcome.done_s for outcome in outcomes) - min(outcome.due_s for outcome in outcomes)


def _session(endpoint: Endpoint) -> aiohttp.ClientSession:
    # By default aiohttp rounds a timeout above five seconds up, to a whole second of the loop's clock.
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s, ceil_threshold=math.inf)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def _send(
    session: aiohttp.ClientSession, endpoint: Endpoint, request: PlannedRequest, start: float, due_s: float
) -> Outcome:
    outcome = Outcome(request.index, request.model, request.tenant, due_s, time.perf_counter() - start)
    body = {
        "model": request.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra_body,
    }
    headers = {"Authorization": f"Bearer {endpoint.api_keys.get(request.tenant, endpoint.default_key)}"}
    try:
        async with session.post(f"{endpoint.url}/completions", json=body, headers=headers) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _read(response, outcome, start)
    except TimeoutError:
        outcome.error = f"no complete answer within {endpoint.timeout_s:g} s"
    except aiohttp.ClientError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    # Deep JSON ends in a RecursionError, Infinity tokens in an OverflowError, a line without end in aiohttp's own.
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        HttpProcessingError,
    ) as error:
        outcome.error = f"the answer is not a stream of completions as OpenAI has it: {type(error).__name__}: {error}"
    if outcome.error is not None:
        outcome.done_s = time.perf_counter() - start
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome, start: float) -> None:
    """Server-sent events until [DONE], which ends the answer whatever its connection does then. The last token's text
    may be empty (half a character, end of text)."""
    ended = counted = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter() - start
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            outcome.done_s = now
            break
        event = json.loads(data)
        if (error := event.get("error")) is not None:
            outcome.error = str(error)[:200]
            return
        if usage := event.get("usage"):
            counted = True
            outcome.prompt_tokens = _tokens(usage["prompt_tokens"])
            outcome.completion_tokens = _tokens(usage["completion_tokens"])
            outcome.cached_tokens = _tokens((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        choices = event.get("choices") or ()
        # An answer without any text still has a first chunk: the one that ends it.
        if any(c.get("text") or (c.get("finish_reason") and not outcome.chunk_s) for c in choices):
            outcome.chunk_s.append(now)
    if not ended:
        outcome.error = "the stream ended without [DONE]"
    elif not outcome.chunk_s:
        outcome.error = "the answer had no choices"
    elif not counted:
        outcome.error = "the answer had no usage; the server must support stream_options.include_usage"
    if ended:
        await _drain(response)


def _tokens(value: Any) -> int:
    if not 0 <= int(value) <= _MOST_COUNTED:
        raise ValueError("usage counts less than no token, or more than any answer has")
    return int(value)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows [DONE], so that the connection can be used again; how that ends changes no outcome."""
    with suppress(TimeoutError, aiohttp.ClientError, HttpProcessingError):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in response.content.iter_any():
                pass
