"""No step of an ingress' event loop takes more than 50 ms of its thread's time, whatever a client sends.

A step is what the loop calls between two looks at its sockets and timers. CPU time of the loop's thread is measured, so
that a busy machine changes nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.deployments.ingress.dispatch.generation_task import SequenceOutput
from app.deployments.ingress.embeddings import answer
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.json_parser import MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES
from app.deployments.ingress.metrics import IngressMetrics
from app.deployments.ingress.preprocess import sequence_builder
from app.deployments.ingress.schemas.completions import EmbeddingsRequest
from app.deployments.ingress.serializers.openai import ChatSerializer
from app.engine.request import TokenLogprobs, Usage
from tests.deployments.http_service import Service

#: Longest step, and largest body, as `limits.max_body_bytes` is by default.
MAX_STEP_S, MAX_BODY = 0.05, 4 << 20


class Steps:
    """Measures the steps of event loops while `watched`: CPU seconds of the thread that runs the loop.

    The step that begins watching is not measured: what is to be measured runs in a task of its own.
    """

    def __init__(self) -> None:
        self.longest_s, self.longest = 0.0, ""

    @contextmanager
    def watched(self) -> Iterator[None]:
        run = asyncio.events.Handle._run  # type: ignore[attr-defined]

        def measured(handle: Any) -> None:
            began_s = time.thread_time()
            run(handle)
            took_s = time.thread_time() - began_s
            if took_s > self.longest_s:
                self.longest_s, self.longest = took_s, repr(handle)[:300]

        gc.collect()
        gc.freeze()  # as an ingress does: what other tests have left is not looked through
        asyncio.events.Handle._run = measured  # type: ignore[attr-defined]
        try:
            yield
        finally:
            asyncio.events.Handle._run = run  # type: ignore[attr-defined]
            gc.unfreeze()

    def check(self) -> None:
        assert self.longest_s < MAX_STEP_S, f"{self.longest_s:.3f} s in one step: {self.longest}"


@pytest_asyncio.fixture
async def client(writing: Service) -> AsyncIterator[httpx.AsyncClient]:
    writing.reconfigure({"max_body_bytes": MAX_BODY, "max_sequences": 64})
    transport = httpx.ASGITransport(make_app(writing, HttpPolicy()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client


def filled(begin: str, unit: str, end: str, num_units: int = MAX_BODY) -> bytes:
    """A body of as many units as the limits of bytes, containers and values allow, or `num_units`."""
    most = min(
        num_units,
        (MAX_BODY - len(begin) - len(end)) // len(unit),
        (MAX_VALUES - 100) // max(sum(map(unit.count, "[{,")), 1),
        (MAX_MEMBERS - 100) // max(unit.count(":"), 1),
        (MAX_CONTAINERS - 100) // max(sum(map(unit.count, "[{")), 1),
    )
    return (begin + unit * most).rstrip(",").encode() + end.encode()


CHAT = '{"model":"base","max_tokens":1,"messages":['
USER = '{"role":"user","content":"a"}]'
CALLED = '{"role":"assistant","tool_calls":[' + '{"id":"a","function":{"name":"a","arguments":"{}"}},' * 127
CALLED += '{"id":"a","function":{"name":"a","arguments":"{}"}}]},'
TEXT = '{"type":"text","text":"a"},'
SCHEMA = '{"type":"object","properties":{' + ",".join(f'"p{n}":{{"type":"string"}}' for n in range(1000)) + "}}"
ALL = {
    "lists": ("/v1/chat/completions", filled("[", "[],", "]")),
    "too many lists": ("/v1/chat/completions", b"[" + b"[]," * (MAX_BODY // 3 - 10) + b"[]]"),
    "objects": ("/v1/completions", filled('{"model":"base","prompt":[', '{"a":0},', "]}")),
    "messages": ("/v1/chat/completions", filled(CHAT, '{"role":"user","content":"a"},', "]}", 16_384)),
    "parts": ("/v1/chat/completions", filled(CHAT + '{"role":"user","content":[', TEXT, "]}]}")),
    "calls": ("/v1/chat/completions", filled(CHAT, CALLED, "]}")),
    "text": ("/v1/chat/completions", filled(CHAT + '{"role":"user","content":"', "a b", '"}]}')),
    "escapes": ("/v1/chat/completions", filled(CHAT + '{"role":"user","content":"', "\\ud83d\\ude00", '"}]}')),
    "tools": (
        "/v1/chat/completions",
        (CHAT + USER + ',"tools":[').encode()
        + ",".join(
            json.dumps({"type": "function", "function": {"name": f"t{n}", "parameters": json.loads(SCHEMA)}})
            for n in range(50)
        ).encode()
        + b"]}",
    ),
    "small messages": ("/v1/chat/completions", filled(CHAT, '{"role":"user","content":"a"},', "]}", 650)),
    "prediction": (
        "/v1/chat/completions",
        filled(CHAT + USER + ',"prediction":{"type":"content","content":"', "a ", '"}}'),
    ),
    "variables": ("/v1/chat/completions", filled(CHAT + USER + ',"chat_template_kwargs":{"a":[', "1,", "]}}")),
    "stops": ("/v1/completions", filled('{"model":"base","prompt":"a","stop":[', '"a",', "]}")),
    "prompt": ("/v1/completions", filled('{"model":"base","prompt":"', "a b", '"}')),
    "ids": ("/v1/completions", filled('{"model":"base","prompt":[', "1,", "]}")),
    "prompts": ("/v1/completions", filled('{"model":"base","prompt":[', "[1],", "]}")),
    "grammar": (
        "/v1/completions",
        filled('{"model":"base","prompt":"a","structured_outputs":{"grammar":"', "\\n", '"}}'),
    ),
    "short grammar": (
        "/v1/completions",
        filled('{"model":"base","prompt":"a","structured_outputs":{"grammar":"', "\\n", '"}}', 65_536),
    ),
    "schema": ("/v1/completions", f'{{"model":"base","prompt":"a","guided_json":{SCHEMA}}}'.encode()),
    "schema of many": ("/v1/completions", filled('{"model":"base","prompt":"a","guided_json":{"enum":[', "1,", "]}}")),
    "schema text": ("/v1/completions", filled('{"model":"base","prompt":"a","guided_json":"', "[", '"}')),
    "choices": ("/v1/completions", filled('{"model":"base","prompt":"a","guided_choice":[', '"a",', "]}")),
    "biases": (
        "/v1/completions",
        ('{"model":"base","prompt":"a","logit_bias":{' + ",".join(f'"{n}":1' for n in range(98_000)) + "}}").encode(),
    ),
    "texts": ("/v1/embeddings", filled('{"model":"base","input":[', '"a",', "]}", 2048)),
    "texts of ids": ("/v1/embeddings", filled('{"model":"base","input":[', "[" + "1," * 200 + "1],", "]}", 2048)),
    "documents": ("/v1/rerank", filled('{"model":"base","query":"a","documents":[', '"a",', "]}", 2048)),
    "pair": ("/v1/score", filled('{"model":"base","text_1":"a","text_2":"', "a b", '"}')),
    "classify": ("/v1/classify", filled('{"model":"base","input":[', '"a",', "]}", 2048)),
    "generate": ("/generate", filled('{"text":[', '"a",', "]}")),
    "tokenize": ("/tokenize", filled('{"model":"base","prompt":"', "a b", '"}')),
    "detokenize": ("/detokenize", filled('{"model":"base","tokens":[', "9,", "]}")),
    "route": ("/v1/route", filled('{"prompt":"', "a ", '"}')),
    "input": ("/v1/responses", filled('{"model":"base","input":[', '{"role":"user","content":"a"},', "]}", 16_384)),
    "input parts": (
        "/v1/responses",
        filled('{"model":"base","input":[{"role":"user","content":[', '{"type":"input_text","text":"a"},', "]}]}"),
    ),
    "metadata": (
        "/v1/responses",
        ('{"model":"base","input":"a","metadata":{' + ",".join(f'"{n}":"1"' for n in range(98_000)) + "}}").encode(),
    ),
    "input tokens": (
        "/v1/responses/input_tokens",
        filled('{"model":"base","input":[', '{"role":"user","content":"a"},', "]}", 16_384),
    ),
    "anthropic": (
        "/v1/messages",
        filled('{"model":"base","max_tokens":1,"messages":[', '{"role":"user","content":"a"},', "]}", 16_384),
    ),
    "count": (
        "/v1/messages/count_tokens",
        filled('{"model":"base","messages":[{"role":"user","content":[', TEXT, "]}]}"),
    ),
    "manifest": (
        "/v1/loras/manifest",
        (
            '{"adapters":[' + ",".join(f'{{"name":"a{n}","path":"a{n}","lazy":true}}' for n in range(10_000)) + "]}"
        ).encode(),
    ),
    "alias": (
        "/v1/aliases/a",
        ('{"targets":{' + ",".join(f'"a{n}":1' for n in range(98_000)) + "}}").encode(),
    ),
}


@pytest.mark.parametrize("name", ALL)
async def test_the_largest_bodies_do_not_hold_the_loop(name: str, client: httpx.AsyncClient) -> None:
    path, body = ALL[name]
    assert len(body) <= MAX_BODY
    headers, method = {"Content-Type": "application/json"}, "PUT" if path.startswith("/v1/aliases") else "POST"
    await client.request(method, path, content=b"{}", headers=headers)  # what is loaded once is not measured
    steps = Steps()
    with steps.watched():
        response = await client.request(method, path, content=body, headers=headers)
    assert response.status_code < 500, response.text[:300]
    steps.check()


async def test_a_step_that_takes_long_is_found() -> None:
    steps = Steps()
    with steps.watched():
        asyncio.get_running_loop().call_soon(lambda: sum(range(50_000_000)))
        await asyncio.sleep(0.01)
    with pytest.raises(AssertionError, match="in one step"):
        steps.check()


@pytest.mark.parametrize("is_chat", [True, False])
async def test_log_probabilities_of_many_answers_do_not_hold_the_loop(is_chat: bool) -> None:
    form = ChatSerializer(
        is_chat, "id", 0, "base", token_text=chr, token_bytes=lambda i: chr(i).encode(),
        text_bytes=lambda i: chr(i).encode(), want_logprobs=True,
    )  # fmt: skip
    top = tuple((token_id, -1.0) for token_id in range(60, 80))
    answers = [
        SequenceOutput("x" * 256, [65] * 256, [TokenLogprobs(65, -1.0, top)] * 256, "length", Usage(1, 0, 256))
        for _ in range(64)
    ]
    steps = Steps()
    with steps.watched():
        content = await asyncio.create_task(form.content(answers, 64))
    steps.check()
    choices = json.loads(content)["choices"]
    assert [choice["index"] for choice in choices] == list(range(64))
    if is_chat:
        assert len(choices[63]["logprobs"]["content"][255]["top_logprobs"]) == 20


@pytest.mark.parametrize("is_chat", [True, False])
async def test_log_probabilities_of_a_long_prompt_do_not_hold_the_loop(is_chat: bool) -> None:
    form = ChatSerializer(
        is_chat, "id", 0, "base", token_text=chr, token_bytes=lambda i: chr(i).encode(),
        text_bytes=lambda i: chr(i).encode(), want_logprobs=False, num_prompt_logprobs=20,
    )  # fmt: skip
    top = tuple((token_id, -1.0) for token_id in range(60, 80))
    prompt = [TokenLogprobs(65, -1.0, top)] * 16_000
    steps = Steps()
    with steps.watched():
        output = SequenceOutput("x", [65], [], "length", Usage(16_001, 0, 1), prompt)
        content = await asyncio.create_task(form.content([output], 1))
    steps.check()
    answer = json.loads(content)
    found = (answer if is_chat else answer["choices"][0])["prompt_logprobs"]
    assert (len(found), found[0], len(found[16_000])) == (16_001, None, 20)


async def test_a_stream_that_begins_with_a_long_prompt_does_not_hold_the_loop(client: httpx.AsyncClient) -> None:
    body = {"model": "base", "prompt": [21] * 900, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
    assert (await client.post("/v1/completions", json=body | {"prompt": "a"})).status_code == 200
    steps = Steps()
    with steps.watched():
        response = await client.post("/v1/completions", json=body)
    steps.check()
    first = json.loads(response.text.partition("data: ")[2].partition("\n")[0])
    assert len(first["choices"][0]["logprobs"]["tokens"]) == 901, response.text[:300]


async def test_log_probabilities_are_bounded_unless_they_are_streamed(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_builder, "MAX_LOGPROBS", 2 * 3 * 21)
    chat: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "a"}], "n": 2, "logprobs": True}
    chat["ignore_eos"] = True
    for max_tokens, stream, status in ((3, False, 200), (4, False, 400), (None, False, 200), (4, True, 200)):
        body = chat | {"top_logprobs": 20, "max_tokens": max_tokens, "stream": stream}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == status, response.text
        if status == 400:
            assert response.json()["error"]["param"] == "top_logprobs"
            assert "at most 126 log-probabilities are returned at once" in response.text
        elif max_tokens is None:
            lengths = [len(choice["logprobs"]["content"]) for choice in response.json()["choices"]]
            assert lengths == [3, 3], "it ends where the limit is"
    legacy = {"model": "base", "prompt": ["a", "b"], "max_tokens": 4, "logprobs": 20}
    assert (await client.post("/v1/completions", json=legacy)).json()["error"]["param"] == "logprobs"


class Embedded:
    """A task whose vectors are there."""

    usages = (Usage(1, 0, 0),)


async def test_many_vectors_do_not_hold_the_loop() -> None:
    body = EmbeddingsRequest(model="base", input="a")
    steps = Steps()
    with steps.watched():
        coroutine = answer(Embedded(), body, [b"\x00\x00\x80?" * 576] * 2048)  # type: ignore[arg-type]
        content = await asyncio.create_task(coroutine)
    steps.check()
    data = json.loads(content)["data"]
    assert (len(data), data[7]) == (2048, {"object": "embedding", "index": 7, "embedding": [1.0] * 576})


async def test_the_lag_of_the_loop_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, found = IngressMetrics(time.time), list[float]()
    monkeypatch.setattr(metrics._loop_lag_s, "observe", found.append)
    task = asyncio.create_task(metrics.measure_loop_lag())
    await asyncio.sleep(0.01)
    time.sleep(0.5)  # holds the loop
    while not found:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert found[0] > 0.2
