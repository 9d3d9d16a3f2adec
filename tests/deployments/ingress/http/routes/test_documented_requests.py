"""Requests as the documentation of vLLM, NVIDIA Dynamo and SGLang (also sgl-jax) shows them for adapters."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.deployments.http_service import Service
from tests.deployments.ingress.http.middleware.test_auth import Org, org

__all__ = ["org"]

COMPLETION = {"prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}


def place(service: Service, *sources: str) -> None:
    """Make the store find an adapter at these sources."""
    for source in sources:
        service.managed.store.contents[source] = service.managed.store.contents["new"]


async def answers(http: httpx.AsyncClient, model: str) -> int:
    return (await http.post("/v1/completions", json=COMPLETION | {"model": model})).status_code


# -- https://docs.vllm.ai/en/latest/features/lora/ --


async def test_vllm_loads_a_path(http: httpx.AsyncClient, service: Service) -> None:
    place(service, "/path/to/sql-lora-adapter")
    body = {"lora_name": "sql_adapter", "lora_path": "/path/to/sql-lora-adapter"}
    answer = await http.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql_adapter' added successfully.")
    assert await answers(http, "sql_adapter") == 200


async def test_vllm_loads_in_place(http: httpx.AsyncClient, service: Service) -> None:
    place(service, "/path/to/adapter")
    service.managed.store.contents["/path/to/adapter-v2"] = service.managed.store.contents["two"]
    body: dict[str, Any] = {"lora_name": "my-adapter", "lora_path": "/path/to/adapter"}
    assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    body |= {"lora_path": "/path/to/adapter-v2"}
    assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 400
    assert (await http.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})).status_code == 200
    assert (await http.get("/v1/loras/my-adapter")).json()["generation"] == 2


@pytest.mark.parametrize("body", [{"lora_name": "sql"}, {"lora_name": "sql", "lora_int_id": 1}])
async def test_vllm_unloads_by_name(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    answer = await http.post("/v1/unload_lora_adapter", json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")


async def test_vllm_loads_a_repository_of_the_hub(http: httpx.AsyncClient, service: Service) -> None:
    repository = "jeeejeee/llama32-3b-text2sql-spider"
    place(service, f"hf://{repository}@main", f"hf://{repository}@v1.0")
    for name, path in (("sql-lora", repository), (repository, f"{repository}@v1.0")):
        answer = await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert answer.status_code == 200, answer.text
        assert await answers(http, name) == 200
    assert (await http.get("/v1/loras/sql-lora")).json()["source"] == f"hf://{repository}@main"


async def test_a_folder_comes_before_a_repository_of_the_same_name(http: httpx.AsyncClient, service: Service) -> None:
    place(service, "team/sql", "hf://team/sql@main")
    assert (await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "team/sql"})).is_success
    assert (await http.get("/v1/loras/a")).json()["source"] == "team/sql"
    answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "team/nothing"})
    assert answer.status_code == 404
    assert "'team/nothing'" in answer.json()["error"]["message"], "the error is of what was asked for"


async def test_vllm_lists_models_with_their_lineage(http: httpx.AsyncClient) -> None:
    listed = {each["id"]: each for each in (await http.get("/v1/models")).json()["data"]}
    assert (listed["base"]["parent"], listed["sql"]["parent"]) == (None, "base")


# -- https://docs.nvidia.com/dynamo/latest/features/lora --


@pytest.mark.parametrize(
    ("name", "uri", "source"),
    [
        ("my-lora", "file:///path/to/my-lora", "/path/to/my-lora"),
        ("customer-support-lora", "s3://my-loras/customer-support-v1", None),
        (
            "codelion/Qwen3-0.6B-accuracy-recovery-lora",
            "s3://my-loras/codelion/Qwen3-0.6B-accuracy-recovery-lora",
            None,
        ),
        ("hub", "hf://org/repo@main", None),
    ],
)
async def test_dynamo_loads_lists_and_unloads(
    http: httpx.AsyncClient, service: Service, name: str, uri: str, source: str | None
) -> None:
    place(service, source or uri)
    answer = await http.post("/v1/loras", json={"lora_name": name, "source": {"uri": uri}})
    body = answer.json()
    assert answer.status_code == 201, answer.text
    assert (body["status"], body["lora_name"], body["source"]) == ("success", name, source or uri)
    assert body["message"] == f"LoRA adapter {name!r} loaded successfully"
    assert await answers(http, name) == 200, "it is served when the load answers"
    assert name in [each["id"] for each in (await http.get("/v1/loras")).json()["data"]]
    gone = (await http.delete(f"/v1/loras/{name}")).json()
    assert (gone["status"], gone["lora_name"], gone["lora_id"]) == ("success", name, body["lora_id"])
    assert await answers(http, name) == 404


@pytest.mark.parametrize(
    "body",
    [
        {"lora_name": "x"},
        {"source": {"uri": "new"}},
        {"lora_name": "x", "source": {}},
        {"lora_name": "x", "source": {"uri": "new"}, "name": "y"},
        {"path": "new"},
        {},
    ],
)
async def test_half_a_request_is_refused_by_name(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    answer = await http.post("/v1/loras", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("name", "lora_name", "source", "source.uri")


# -- https://docs.sglang.io/docs/advanced_features/lora --


async def test_sglang_loads_pins_and_unloads(http: httpx.AsyncClient, service: Service) -> None:
    repository = "Nutanix/Meta-Llama-3.1-8B-Instruct_lora_4_alpha_16"
    place(service, f"hf://{repository}@main")
    for extra in ({}, {"pinned": True}):
        answer = await http.post("/load_lora_adapter", json={"lora_name": "lora0", "lora_path": repository} | extra)
        assert answer.status_code == 200, answer.text
        assert answer.json()["loaded_adapters"] == {"lora0": f"hf://{repository}@main", "sql": "sql"}
        assert (await http.get("/v1/loras/lora0")).json()["pinned"] == bool(extra)
        again = await http.post("/load_lora_adapter", json={"lora_name": "lora0", "lora_path": repository})
        assert again.status_code == 400
        answer = await http.post("/unload_lora_adapter", json={"lora_name": "lora0"})
        assert answer.json() == {"success": True, "loaded_adapters": {"sql": "sql"}}


async def test_sglang_generates_with_a_list_of_adapters(http: httpx.AsyncClient) -> None:
    texts = ["List 3 countries and their capitals."] * 2
    params = {"max_new_tokens": 8, "temperature": 0}
    body = {"text": texts, "sampling_params": params, "lora_path": ["sql", None]}
    answer = await http.post("/generate", json=body)
    assert [each["meta_info"]["lora"] for each in answer.json()] == ["sql", None]


async def test_sglang_names_an_adapter_after_the_base(http: httpx.AsyncClient) -> None:
    assert await answers(http, "base:sql") == 200


async def test_a_project_loads_its_own_folders_only(org: Org) -> None:
    body = {"lora_name": "x", "lora_path": "team/sql"}
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
        assert (await org.ask("ada", "POST", path, json=body)).status_code == 403
    source = {"lora_name": "x", "source": {"uri": "file:///srv/others"}}
    assert (await org.ask("ada", "POST", "/v1/loras", json=source)).status_code == 403
    pinned = {"lora_name": "x", "lora_path": f"{org.ids['ada']}/sql", "pinned": True}
    assert (await org.ask("ada", "POST", "/load_lora_adapter", json=pinned)).status_code == 403
