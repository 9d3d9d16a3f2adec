"""Token ids in and token ids out of /v1/completions, and which adapter has drawn them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from app.engine.request import GenerateRequest
from tests.deployments.http_service import Service
from tests.deployments.managed import wanted
from tests.fakes import fake_tokens

PROMPT = [5, 17, 40, 3]
ASKED: dict[str, Any] = {"model": "sql", "prompt": PROMPT, "max_tokens": 12, "seed": 7, "return_token_ids": True}


def true_tokens(service: Service, index: int = -1) -> list[int]:
    """What a request that a replica was given draws when it is computed alone."""
    request: GenerateRequest = next(iter(service.fleet.replicas.values())).submitted[index]
    adapter = None if request.adapter is None else service.fleet.adapters[request.adapter.digest]
    return [item.token_id for item in fake_tokens(request, adapter)]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for token in event["choices"][0]["token_ids"]]


def adapter_of(service: Service) -> dict[str, Any]:
    entry = service.registry.adapter("sql", "default")
    assert entry is not None
    return {"name": "sql", "generation": entry.ref.generation, "digest": entry.ref.digest}


@pytest.mark.parametrize("end", [{}, {"stop_token_ids": list(range(61))}, {"ignore_eos": True}])
async def test_answers_have_every_token_that_was_drawn(
    http: httpx.AsyncClient, service: Service, end: dict[str, Any]
) -> None:
    body = (await http.post("/v1/completions", json=ASKED | end | {"logprobs": 2})).json()
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["token_ids"] == true_tokens(service)
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert body["adapter"] == adapter_of(service)
    if "stop_token_ids" in end:
        assert (choice["finish_reason"], choice["text"], len(choice["token_ids"])) == ("stop", "", 1)


async def test_a_stream_has_the_same_tokens(http: httpx.AsyncClient, service: Service) -> None:
    fields = ASKED | {"prompt": [PROMPT, [9]], "n": 2, "logprobs": 0, "ignore_eos": True}
    whole = (await http.post("/v1/completions", json=fields)).json()
    events = events_of(await http.post("/v1/completions", json=fields | {"stream": True}))
    assert len(whole["choices"]) == 4
    for choice in whole["choices"]:
        pieces = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert len(pieces) > 1
        assert [piece.get("prompt_token_ids") for piece in pieces] == [choice["prompt_token_ids"]] + [None] * (
            len(pieces) - 1
        )
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert {json.dumps(event["adapter"]) for event in events} == {json.dumps(adapter_of(service))}


async def test_the_lean_form_has_no_text(http: httpx.AsyncClient, service: Service) -> None:
    fields = ASKED | {"logprobs": 0}
    (received,) = (await http.post("/v1/completions", json=fields)).json()["choices"]
    lean = fields | {"return_token_ids": False, "detokenize": False}
    (choice,) = (await http.post("/v1/completions", json=lean)).json()["choices"]
    assert choice["token_ids"] == received["token_ids"] == true_tokens(service)
    assert choice["text"] == ""
    assert choice["logprobs"] == {"token_logprobs": received["logprobs"]["token_logprobs"]}
    (choice,) = (await http.post("/v1/completions", json=lean | {"logprobs": 2})).json()["choices"]
    for token_id, logprob, top in zip(
        choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True
    ):
        assert len(top) == 2
        assert top.get(f"token_id:{token_id}", logprob) == logprob
        assert max(top.values()) >= logprob
    events = events_of(await http.post("/v1/completions", json=lean | {"stream": True}))
    assert tokens_of(events) == received["token_ids"]
    assert len(events) > 1, "they come as they are drawn"


async def test_without_asking_there_are_none(http: httpx.AsyncClient, service: Service) -> None:
    body = (await http.post("/v1/completions", json=ASKED | {"return_token_ids": False})).json()
    assert "adapter" not in body
    assert not {"token_ids", "prompt_token_ids"} & body["choices"][0].keys()
    base = (await http.post("/v1/completions", json=ASKED | {"model": "base"})).json()
    assert (base["adapter"], base["choices"][0]["token_ids"]) == (None, true_tokens(service))


@pytest.mark.parametrize("fields", [{"echo": True}, {"detokenize": False, "stop": "x"}])
async def test_what_needs_text_is_refused(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    assert (await http.post("/v1/completions", json=ASKED | fields)).status_code == 400


@pytest.mark.parametrize("route", ["completions", "chat/completions", "generate"])
async def test_every_answer_says_which_contents_drew_it(http: httpx.AsyncClient, service: Service, route: str) -> None:
    adapter = adapter_of(service)
    if route == "generate":
        body = {"text": "hi", "lora_path": "sql", "sampling_params": {"max_new_tokens": 2}}
        received = (await http.post("/generate", json=body)).json()["meta_info"]
        assert (received["lora"], received["lora_generation"], received["lora_digest"]) == tuple(adapter.values())
        return
    prompt = {"prompt": "hi"} if route == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    for stream in (False, True):
        answer = await http.post(f"/v1/{route}", json={"model": "sql", "max_tokens": 2, "stream": stream} | prompt)
        assert answer.headers["X-Polylora-Adapter"] == f"sql@{adapter['generation']}"
        assert answer.headers["X-Polylora-Adapter-Digest"] == adapter["digest"]


async def test_versions_never_mix_within_an_answer(http: httpx.AsyncClient, service: Service) -> None:
    """A name means other contents, and the replica is lost, in the middle of an answer: it ends as it began."""
    first, old = service.fleet.replicas["replica-0"], adapter_of(service)
    first.backend.max_steps = 5
    fields = ASKED | {"max_tokens": 30, "ignore_eos": True, "stream": True}
    running = asyncio.create_task(http.post("/v1/completions", json=fields))
    async with asyncio.timeout(60):
        while first.backend.num_steps < 5:
            await asyncio.sleep(0.01)
    await service.managed.client.load_and_wait(wanted("sql", "new"))
    new = adapter_of(service)
    assert new["generation"] == old["generation"] + 1
    assert new["digest"] != old["digest"]
    second = service.fleet.add()
    service.fleet.kill("replica-0")
    events = events_of(await running)
    tokens = tokens_of(events)
    assert second.submitted[0].resume_token_ids, "it has gone on elsewhere, from the middle"
    assert tokens == true_tokens(service, 0)
    assert len(tokens) == 30
    assert all(event["adapter"] == old for event in events)
    again = (await http.post("/v1/completions", json=fields | {"stream": False})).json()
    assert again["adapter"] == new
    assert again["choices"][0]["token_ids"] != tokens
