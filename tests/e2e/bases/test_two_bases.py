"""`configs/serve-two-bases.yaml`, end to end: two base models with adapters behind one URL, for the official client."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from app.base_models import load_bases
from app.config import ADMIN_KEY
from app.deployments.tenancy.auth.key_crypto import new_key
from app.engine.api import LLM
from app.engine.request import SamplingParams
from load_tests.random_adapters import write_random_adapter
from load_tests.service import ROOT, free_port
from tests.e2e.process import ServiceProcess, polylora_serve, serve_run, tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model

#: By day tests/deployments/ingress/http/test_base_router.py has the routes.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

#: The template of the second base model's adapter; Gemma has none of its own.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
QUESTION = "Question: What is the capital of France?\nAnswer:"
KEY = new_key(is_admin=True).value


def shipped(folder: Path, port: int) -> dict[str, Any]:  # noqa: ARG001
    document: dict[str, Any] = yaml.safe_load((ROOT / "configs/serve-two-bases.yaml").read_text())
    document["http_options"]["port"] = port
    return document


def tiny(folder: Path, port: int) -> dict[str, Any]:
    for seed, name in enumerate(("model", "second")):
        save_tiny_model(folder / name, seed=seed)
    save_adapter(folder / "loras" / "r8", rank=8, seed=0)
    document = tiny_document(port, folder, {"num_kv_blocks": 512, "cpu": {"num_threads": 1}}, preload=["r8"])
    args = document["applications"][0]["args"]
    first = {"model": args.pop("model"), "adapters": args.pop("adapters")}
    args["bases"] = [first, {"model": {"uri": str(folder / "second"), "name": "second"}}]
    return document


@pytest.mark.parametrize(("start", "document_of"), [(polylora_serve, tiny), (serve_run, shipped)])
def test_one_client_uses_two_base_models_and_their_adapters(
    start: Callable[..., ServiceProcess], document_of: Callable[[Path, int], dict[str, Any]], tmp_path: Path
) -> None:
    port = free_port()
    document = document_of(tmp_path, port)
    first, second = load_bases(document["applications"][0]["args"])
    adapters = [adapter.name for adapter in first.adapters.preload]
    roots = tmp_path / "roots"
    with LLM(second.model.uri, second.engine) as llm:
        folder = write_random_adapter(roots / "brief", llm.spec, 8, seed=0)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        alone = llm.generate(QUESTION, None, sampling)[0].text
        by_adapter = llm.generate([llm.chat_prompt(QUESTION, adapter=folder)], folder, sampling)[0].text
    assert alone != by_adapter
    process = start(document, port, {"LORA_PATH": str(roots), ADMIN_KEY: KEY})
    try:
        process.wait_until_healthy(900)
        client = openai.OpenAI(
            base_url=f"{process.url}/v1", api_key="none", admin_api_key=KEY, max_retries=0, timeout=600
        )
        admin = client.admin.organization
        project = admin.projects.create(name="ada")
        account = admin.projects.service_accounts.create(project.id, name="app")
        assert account.api_key is not None
        body = {"name": "brief", "path": "brief", "wait": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        refused = httpx.post(f"{process.url}/v1/loras", json=body, headers=headers, timeout=60)
        assert refused.status_code == 400
        assert "base_model" in refused.text
        query = {"base_model": second.model.name}
        loaded = httpx.post(f"{process.url}/v1/loras", params=query, json=body, headers=headers, timeout=300)
        assert loaded.status_code == 201, loaded.text
        began_s = int(time.time())
        with client.with_options(api_key=account.api_key.value) as user:
            parents = {model.id: model.model_dump()["parent"] for model in user.models.list().data}
            names = [first.model.name, second.model.name]
            assert parents == {
                names[0]: None, **dict.fromkeys(adapters, names[0]), names[1]: None, "brief": names[1]
            }  # fmt: skip
            said = {model: chat(user, model) for model in (names[0], adapters[0])}
            assert said[names[0]] != said[adapters[0]]
            extra = {"ignore_eos": True}
            completion = user.completions.create(
                model=names[1], prompt=QUESTION, max_tokens=12, temperature=0, extra_body=extra
            )
            assert completion.choices[0].text == alone
            stream = user.chat.completions.create(
                model="brief", messages=[{"role": "user", "content": QUESTION}], max_tokens=12, temperature=0,
                stream=True, extra_body=extra,
            )  # fmt: skip
            pieces = [event.choices[0].delta.content or "" for event in stream if event.choices]
            assert "".join(pieces) == by_adapter
            assert len(pieces) > 2
            with pytest.raises(openai.NotFoundError, match="there is no model or adapter 'nobody'"):
                chat(user, "nobody")
            wait_for_usage(process.url, headers, began_s, dict.fromkeys([*said, names[1], "brief"], 1))
            limits = admin.projects.rate_limits
            assert [each.model for each in limits.list_rate_limits(project.id).data] == names
            limits.update_rate_limit(f"rl-{names[1]}", project_id=project.id, max_requests_per_1_minute=0)
            with pytest.raises(openai.RateLimitError):
                chat(user, "brief")
            assert chat(user, adapters[0]) == said[adapters[0]]
    finally:
        assert process.stop() == 0


def chat(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Which customers live in Porto?"}],
        max_tokens=24,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


def wait_for_usage(url: str, headers: dict[str, str], began_s: int, expected: dict[str, int]) -> None:
    """Until the ledger has each model's requests; more than expected is an error at once."""
    query = {"start_time": began_s - 60, "bucket_width": "1d", "group_by[]": "model"}
    for _ in range(300):
        answer = httpx.get(f"{url}/v1/organization/usage/completions", params=query, headers=headers, timeout=60)
        results = [result for bucket in answer.json()["data"] for result in bucket["results"]]
        counted = {each["model"]: each["num_model_requests"] for each in results}
        assert all(number <= expected.get(name, 0) for name, number in counted.items()), counted
        if counted == expected:
            return
        time.sleep(0.2)
    raise AssertionError(f"the ledger has {counted}")
