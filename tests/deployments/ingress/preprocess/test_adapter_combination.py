"""Several adapters in one request: who may name which, and what a registered combination is shown as."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.deployments.ingress.preprocess.adapter_combination import CombinationBody
from app.deployments.ingress.principal import Principal, handle_principal
from app.deployments.ingress.schemas.openai import CompletionRequest, GenerateBody, WeightedAdapter
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.tenancy.models import PUBLIC
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.adapters.combining.combination import CombinationPart, make_combination
from app.engine.errors import InvalidRequest, NotFound
from tests.deployments.http_service import Service
from tests.deployments.managed import wanted
from tests.fakes import fake_adapter

BOTH = [{"name": "sql", "weight": 0.7}, {"name": "two"}]


@pytest.fixture
def served(service: Service, _two: None) -> Service:
    """The sum of sql and two is in the store's memory, as the store would have made it."""
    derived = derived_of(service)
    made = fake_adapter("their sum", 8)
    service.fleet.adapters[derived.digest] = replace(made, card=replace(made.card, digest=derived.digest))
    return service


def derived_of(service: Service) -> Any:
    parts = []
    for name, weight in (("sql", 0.7), ("two", 1.0)):
        ref = service.registry.resolve(name, "", "default")
        assert ref is not None
        parts.append(CombinationPart(ref, weight))
    return make_combination(parts).ref("default")


@pytest_asyncio.fixture(autouse=True)
async def _two(service: Service) -> None:
    await service.managed.client.load_and_wait(wanted("two", "two"))


async def test_one_derived_adapter_answers_on_every_route(served: Service, http: httpx.AsyncClient) -> None:
    derived = derived_of(served)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("/v1/chat/completions", {"model": "base"} | chat),
        ("/v1/completions", {"model": "base", "prompt": "hi", "max_tokens": 3}),
        ("/v1/responses", {"model": "base", "input": "hi", "max_output_tokens": 3}),
        ("/v1/responses/input_tokens", {"model": "base", "input": "hi"}),
        ("/v1/messages", {"model": "base", "max_tokens": 3} | chat),
        ("/v1/messages/count_tokens", {"model": "base"} | chat),
        ("/v1/embeddings", {"model": "base", "input": "hi"}),
        ("/generate", {"text": ["hi", "ho"], "sampling_params": {"max_tokens": 3}}),
    ):
        answer = await http.post(path, json=body | {"adapters": BOTH})
        assert answer.status_code == 200, answer.text
        if path not in ("/generate", "/v1/responses/input_tokens", "/v1/messages/count_tokens"):
            assert answer.headers["X-Polylora-Adapter"] == "sql*0.7+two*1@1"
    assert served.registry.num_adapters == 2, "nothing was registered for it"
    ref = await served.preprocessor.resolver.resolve(
        "base", handle_principal(), adapters=[WeightedAdapter(name="sql", weight=0.7), WeightedAdapter(name="two")]
    )
    assert ref == derived


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"model": "sql"}, 400, "a request with adapters must have model 'base'"),
        ({"lora_path": "sql"}, 400, "a request with adapters must have model"),
        ({"adapters": []}, 400, "at least 1 item"),
        ({"adapters": [{"name": "sql"}] * 2}, 400, "adapter 'sql' is named twice"),
        ({"adapters": [{"name": "nobody's"}]}, 404, 'there is no model or adapter "nobody\'s"'),
        ({"adapters": [{"name": "sql", "weight": 1e999}]}, 400, "finite"),
        ({"adapters": [{"name": "sql", "weight": 0}]}, 400, "all weights are 0, which leaves the base model"),
        ({"adapters": [{"name": "sql", "scale": 1}]}, 400, "unknown field"),
    ],
)
async def test_mistakes_are_named(http: httpx.AsyncClient, change: Any, status: int, said: str) -> None:
    body = {"model": "base", "prompt": "hi", "adapters": BOTH} | change
    if change.get("adapters") and change["adapters"][0].get("weight") == float("inf"):
        content = '{"model": "base", "prompt": "hi", "adapters": [{"name": "sql", "weight": 1e999}]}'
        answer = await http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    else:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


async def test_nobody_combines_what_they_may_not_use(service: Service) -> None:
    adapters = [WeightedAdapter(name="sql"), WeightedAdapter(name="two")]
    stranger = Principal("zed", "key", PUBLIC)
    ref = await service.preprocessor.resolver.resolve("base", stranger, adapters=adapters)
    assert ref is not None
    assert ref.tenant_id == "zed", "public adapters are everybody's, and their sum is the caller's"
    await service.managed.client.load_and_wait(replace(wanted("hers", "new"), tenant_id="ada"))
    with pytest.raises(NotFound, match="'hers'"):
        await service.preprocessor.resolver.resolve(
            "base", stranger, adapters=[*adapters, WeightedAdapter(name="hers")]
        )


async def test_a_combination_is_registered_under_a_name(service: Service, http: httpx.AsyncClient) -> None:
    combine = {"adapters": BOTH, "method": "svd", "svd_rank": 4}
    method = parse_body(CombinationBody, combine).combination_method
    adapters = parse_body(CombinationBody, combine).adapters
    combination = service.preprocessor.resolver.combine(adapters, handle_principal(), method=method)
    service.managed.store.contents[combination.source] = combination.digest
    answer = await http.post("/v1/loras", json={"name": "mix", "combine": combine, "wait": True})
    assert answer.status_code == 201, answer.text
    assert answer.json()["digest"] == combination.digest
    assert answer.json()["source"] == "svd(sql*0.7+two*1)"
    assert answer.json()["job"]["path"] == "svd(sql*0.7+two*1)"
    listed = (await http.get("/v1/models/mix")).json()
    assert listed["root"] == "mix"
    events = (await http.get("/v1/events", params={"name": "mix"})).text
    assert "svd(sql*0.7+two*1)" in events
    assert "combination:" not in events


def template(text: str) -> str:
    """The text of an adapter with this chat template."""
    return AdapterTokenizer(text, {}, {}).to_json()


async def test_a_combination_writes_prompts_as_its_parts_are_registered(
    service: Service, http: httpx.AsyncClient
) -> None:
    """Each part's text comes from the registration that the caller named, and stays with the registered combination."""
    contents, texts = service.managed.store.contents, service.managed.store.texts
    contents["zed/sql"], texts["digest of zed"] = "digest of zed", template("zed's")
    ref = service.registry.resolve("sql", "", "default")
    assert ref is not None
    texts[ref.digest] = template("sql's")
    await service.managed.client.load_and_wait(wanted("sql", "sql"))
    texts[ref.digest] = template("of another tenant with equal contents, read later")
    await service.managed.client.load_and_wait(replace(wanted("copy", "sql"), tenant_id="mallory"))
    one = [WeightedAdapter(name="sql", weight=0.9)]
    combination = service.preprocessor.resolver.combine(one, handle_principal())
    contents[combination.source] = combination.digest
    texts[combination.digest] = template("whoever was read first")
    body = {"name": "mix", "wait": True, "combine": {"adapters": [{"name": "sql", "weight": 0.9}]}}
    answer = await http.post("/v1/loras", json=body)
    assert answer.status_code == 201, answer.text
    directory = service.preprocessor.directory
    assert directory.text(combination.ref("default")) == template("sql's")
    mix = service.registry.resolve("mix", "", "default")
    assert directory.text(mix) == template("sql's")
    contents["sql"] = "digest of zed"
    await service.managed.client.load_and_wait(wanted("sql", "sql"))
    assert directory.text(mix) == template("sql's"), "also after a part has other contents"
    body = {"model": "base", "prompt": "hi", "adapters": BOTH}
    refused = await http.post("/v1/completions", json=body)
    assert refused.status_code == 400, refused.text
    assert "write prompts or end answers differently" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "give either path, where the adapter is, or combine"),
        ({"path": "sql", "combine": {"adapters": BOTH}}, "give either path, where the adapter is, or combine"),
        ({"path": 'combination:{"parts":[]}'}, "is not a path; POST /v1/loras with combine registers a combination"),
        ({"combine": {"adapters": BOTH, "method": "ties"}}, "method 'ties' needs a density"),
        ({"combine": {"adapters": BOTH, "density": 0.5}}, "method 'cat' has no use for density"),
        ({"combine": {"adapters": BOTH, "method": "average"}}, "Input should be 'cat', 'linear'"),
    ],
)
async def test_what_cannot_be_registered(http: httpx.AsyncClient, body: Any, said: str) -> None:
    answer = await http.post("/v1/loras", json={"name": "mix"} | body)
    assert answer.status_code in (400, 403), answer.text
    assert said in answer.json()["error"]["message"]


def test_a_body_says_adapters_once() -> None:
    parsed = parse_body(CompletionRequest, {"model": "base", "prompt": "x", "adapters": BOTH})
    assert parsed.adapters is not None
    assert [(one.name, one.weight) for one in parsed.adapters] == [("sql", 0.7), ("two", 1.0)]
    assert parse_body(GenerateBody, {"text": "x", "adapters": BOTH}).names == [None]
    with pytest.raises(InvalidRequest, match="at most 16"):
        parse_body(CompletionRequest, {"model": "base", "prompt": "x", "adapters": BOTH * 9})
