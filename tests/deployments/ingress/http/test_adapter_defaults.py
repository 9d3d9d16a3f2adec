"""Generation defaults of an adapter: a request's values win, then the name's, then the files', then the base's."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.schemas.openai import WeightedAdapter
from app.deployments.registry.models import DEFAULT_TENANT
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.request import GenerateRequest, SamplingParams
from tests.deployments.http_service import Service
from tests.deployments.managed import wanted
from tests.fakes import fake_adapter

FILES = {"eos_token_id": [3, 4], "temperature": 0.25, "top_p": 0.5, "top_k": 3, "max_new_tokens": 7}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest_asyncio.fixture(autouse=True)
async def _loaded(service: Service) -> None:
    """ "new" has defaults in its files, "sql" has none."""
    store = service.managed.store
    store.texts[str(store.contents["new"])] = AdapterTokenizer(None, {}, {}, FILES).to_json()
    await service.managed.client.load_and_wait(wanted("new", "new"))


async def sampled(service: Service, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> SamplingParams:
    """How the engine draws for a request."""
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return last_requests(service)[0].sampling


def last_requests(service: Service) -> tuple[GenerateRequest, ...]:
    task = service.counted[-1][0]
    assert task is not None
    return task.requests


def values(sampling: SamplingParams) -> tuple[Any, ...]:
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, sampling.eos_token_ids


ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, "max_tokens"),
    ("/v1/completions", {"prompt": "hi"}, "max_tokens"),
    ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
]


@pytest.mark.parametrize(("path", "body", "limit"), ROUTES, ids=[route[0] for route in ROUTES])
async def test_what_a_request_leaves_out_is_the_names_own_and_else_the_files(
    service: Service, http: httpx.AsyncClient, path: str, body: dict[str, Any], limit: str
) -> None:
    async def drawn(**fields: Any) -> tuple[Any, ...]:
        return values(await sampled(service, http, path, {"model": "new"} | body | fields))

    assert await drawn() == (0.25, 0.5, 3, 7, (3, 4))
    assert await drawn(temperature=1.0, **{limit: 2}) == (1.0, 0.5, 3, 2, (3, 4)), "also a value that is the usual one"
    assert await drawn(temperature=None) == (0.25, 0.5, 3, 7, (3, 4)), "null is absent"
    changed = await http.patch("/v1/loras/new", json={"defaults": {"temperature": 0.75, "max_tokens": 5}})
    assert changed.status_code == 200, changed.text
    assert changed.json()["defaults"] == {"temperature": 0.75, "max_tokens": 5}
    assert changed.json()["generation_config"] == FILES
    assert await drawn() == (0.75, 0.5, 3, 5, (3, 4))
    assert await drawn(top_p=1.0, **{limit: 2}) == (0.75, 1.0, 3, 2, (3, 4))
    assert (await http.patch("/v1/loras/new", json={"defaults": {}})).json()["defaults"] == {}
    assert await drawn() == (0.25, 0.5, 3, 7, (3, 4))


async def test_messages_and_generate_take_them_too(service: Service, http: httpx.AsyncClient) -> None:
    found = await sampled(service, http, "/v1/messages", {"model": "new", "max_tokens": 3} | CHAT)
    assert values(found) == (0.25, 0.5, 3, 3, (3, 4))
    found = await sampled(service, http, "/v1/messages", {"model": "new", "max_tokens": 3, "temperature": 1.0} | CHAT)
    assert values(found) == (1.0, 0.5, 3, 3, (3, 4))
    await sampled(service, http, "/generate", {"text": ["hi", "ho"], "lora_path": "new"})
    assert [each.sampling.max_tokens for each in last_requests(service)] == [7, 7]
    texts = {"text": ["hi", "ho", "hu"], "lora_path": ["new", "sql", None], "sampling_params": {"max_new_tokens": 5}}
    await sampled(service, http, "/generate", texts)
    usual = (1.0, 1.0, 0, 5, None)
    assert [values(each.sampling) for each in last_requests(service)] == [(0.25, 0.5, 3, 5, (3, 4)), usual, usual]


async def test_the_base_and_other_adapters_keep_theirs(service: Service, http: httpx.AsyncClient) -> None:
    for model in ("base", "sql"):
        found = await sampled(service, http, "/v1/completions", {"model": model, "prompt": "hi"})
        assert values(found) == (1.0, 1.0, 0, 16, None)


@pytest.mark.parametrize("change", ["replaced", "unloaded"])
async def test_a_request_keeps_what_its_adapter_has_while_the_name_gets_other_contents(
    service: Service, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    contents, managed, preprocessor = service.managed.store.contents, service.managed, service.preprocessor
    prompt_ids = preprocessor.prompt_ids

    async def change_name(*arguments: Any) -> Any:
        found = await prompt_ids(*arguments)
        if change == "replaced":
            await managed.client.load_and_wait(wanted("new", "two"))
        else:
            assert (await http.delete("/v1/loras/new?wait=false")).status_code == 202
        while (entry := service.registry.adapter("new", DEFAULT_TENANT)) and entry.ref.digest == contents["new"]:
            await asyncio.sleep(0.01)
        return found

    monkeypatch.setattr(preprocessor, "prompt_ids", change_name)
    found = await sampled(service, http, "/v1/completions", {"model": "new", "prompt": "hi"})
    (request,) = last_requests(service)
    assert request.adapter is not None
    assert request.adapter.digest == contents["new"]
    assert values(found) == (0.25, 0.5, 3, 7, (3, 4))


async def test_a_default_limit_is_cut_to_the_context_and_a_requested_one_is_refused(
    service: Service, http: httpx.AsyncClient
) -> None:
    assert (await http.patch("/v1/loras/new", json={"defaults": {"max_tokens": 1000}})).status_code == 200
    found = await sampled(service, http, "/v1/completions", {"model": "new", "prompt": "hi"})
    assert found.max_tokens == 126
    answer = await http.post("/v1/completions", json={"model": "new", "prompt": "hi", "max_tokens": 1000})
    assert answer.status_code == 400
    too_long = await http.post("/v1/completions", json={"model": "new", "prompt": "x" * 128})
    assert too_long.status_code == 400


async def test_a_system_prompt_opens_conversations_without_one(service: Service, http: httpx.AsyncClient) -> None:
    settings = {"name": "two", "path": "two", "wait": True, "defaults": {"system_prompt": "Be brief.", "top_k": 2}}
    assert (await http.post("/v1/loras", json=settings)).json()["defaults"]["system_prompt"] == "Be brief."

    def written(*messages: tuple[str, str]) -> list[int]:
        text = "".join(f"{role}:{content}|" for role, content in messages)
        return service.preprocessor.tokenizer.encode(text)

    async def prompt(model: str, *messages: tuple[str, str]) -> list[int]:
        body = [{"role": role, "content": content} for role, content in messages]
        answer = await http.post("/tokenize", json={"model": model, "messages": body})
        assert answer.status_code == 200, answer.text
        found = await sampled(
            service, http, "/v1/chat/completions", {"model": model, "messages": body, "max_tokens": 1}
        )
        assert found.top_k == (2 if model == "two" else 0)
        assert list(last_requests(service)[0].token_ids) == answer.json()["tokens"]
        return answer.json()["tokens"]

    user = ("user", "hi")
    assert await prompt("two", user) == written(("system", "Be brief."), user)
    assert await prompt("sql", user) == written(user)
    assert await prompt("two", ("system", "Be long."), user) == written(("system", "Be long."), user)
    assert await prompt("two", ("developer", "Be long."), user) == written(("system", "Be long."), user)
    counted = await http.post("/v1/messages/count_tokens", json={"model": "two"} | CHAT)
    assert counted.json()["input_tokens"] == len(written(("system", "Be brief."), user))
    own = await http.post("/v1/messages/count_tokens", json={"model": "two", "system": ""} | CHAT)
    assert own.json()["input_tokens"] == len(written(("system", ""), user)), "an empty one is a system message, too"


async def test_defaults_outlive_a_load_and_not_an_unload(http: httpx.AsyncClient) -> None:
    two = {"name": "two", "path": "two", "wait": True}
    assert (await http.post("/v1/loras", json=two | {"defaults": {"top_k": 2}})).json()["defaults"] == {"top_k": 2}
    assert (await http.post("/v1/loras", json=two)).json()["defaults"] == {"top_k": 2}
    assert (await http.patch("/v1/loras/two", json={"description": "x"})).json()["defaults"] == {"top_k": 2}
    assert (await http.get("/v1/loras")).json()["data"][-1]["defaults"] == {"top_k": 2}
    assert (await http.post("/v1/loras", json=two | {"defaults": {}})).json()["defaults"] == {}
    assert (await http.patch("/v1/loras/two", json={"defaults": {"top_k": 3}})).status_code == 200
    assert (await http.delete("/v1/loras/two")).status_code == 200
    assert (await http.post("/v1/loras", json=two)).json()["defaults"] == {}
    lazy = {"name": "lazy", "path": "two", "lazy": True, "defaults": {"top_k": 4}}
    assert (await http.post("/v1/loras", json=lazy)).json()["defaults"] == {"top_k": 4}
    assert (await http.post("/v1/loras/lazy/load")).json()["defaults"] == {"top_k": 4}
    manifest = {"adapters": [{"name": "many", "path": "two", "defaults": {"top_k": 5}}]}
    assert (await http.post("/v1/loras/manifest", json=manifest)).status_code == 200
    assert (await http.get("/v1/loras/many")).json()["defaults"] == {"top_k": 5}


async def test_combined_adapters_agree_on_their_ends_and_have_no_other_defaults(
    service: Service, http: httpx.AsyncClient
) -> None:
    both = {"model": "base", "prompt": "hi", "adapters": [{"name": "sql"}, {"name": "new"}]}
    refused = await http.post("/v1/completions", json=both)
    assert refused.status_code == 400
    assert "end answers differently" in refused.json()["error"]["message"]
    store = service.managed.store
    store.texts[str(store.contents["new"])] = AdapterTokenizer(None, {}, {}, {"temperature": 0.25}).to_json()
    await service.managed.client.load_and_wait(wanted("new", "new"))
    ref = await service.preprocessor.resolver.resolve("new", handle_principal())
    assert service.preprocessor.directory.defaults(ref).sampling == {"temperature": 0.25}
    names = [WeightedAdapter(name="sql"), WeightedAdapter(name="new")]
    ref = await service.preprocessor.resolver.resolve("base", handle_principal(), adapters=names)
    assert service.preprocessor.directory.defaults(ref).sampling == {}


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"temperature": 3}, "defaults.temperature"),
        ({"max_tokens": 0}, "defaults.max_tokens"),
        ({"system_prompt": ""}, "defaults.system_prompt"),
        ({"system_prompt": "x" * 16_385}, "defaults.system_prompt"),
        ({"stop": "x"}, "defaults.stop"),
        ({"system_prompt": "use sk-poly-" + "a" * 48}, "API key"),
        ([], "defaults"),
    ],
)
async def test_defaults_that_no_request_could_have_are_refused(
    http: httpx.AsyncClient, defaults: Any, message: str
) -> None:
    for method, path, body in (
        ("PATCH", "/v1/loras/sql", {}),
        ("POST", "/v1/loras", {"name": "two", "path": "two"}),
    ):
        answer = await http.request(method, path, json=body | {"defaults": defaults})
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(("own", "ends"), [([0, 68], (0,)), ([68], None), ([2, 0], (2, 0))])
async def test_an_answer_with_a_grammar_ends_with_the_adapters_special_tokens(
    writing: Service, writer: httpx.AsyncClient, own: list[int], ends: tuple[int, ...] | None
) -> None:
    """Token 68 is a letter, which the grammar needs inside the answer."""
    adapter = fake_adapter("own", 8)
    writing.fleet.adapters[adapter.card.digest] = adapter
    store = writing.managed.store
    store.contents["own"] = adapter.card.digest
    store.texts[adapter.card.digest] = AdapterTokenizer(None, {}, {}, {"eos_token_id": own}).to_json()
    await writing.managed.client.load_and_wait(wanted("own", "own"))
    body = {"model": "own", "structured_outputs": {"choice": ["abab"]}} | CHAT
    answer = (await writer.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "abab"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert last_requests(writing)[0].sampling.eos_token_ids == ends
