"""Adapters come, change and go while requests run."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.service.conftest import RANKS, Service
from tests.e2e.tiny import save_adapter

PROMPT = {"prompt": "the quick", "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}


async def complete(client: openai.AsyncOpenAI, model: str) -> str:
    return (await client.completions.create(model=model, **PROMPT)).choices[0].text


async def test_load_and_unload_while_traffic_runs(service: Service) -> None:
    for index in range(6):
        save_adapter(service.loras / f"extra{index}", rank=4 + index, seed=100 + index)
    stop = asyncio.Event()
    async with service.openai() as client, httpx.AsyncClient(base_url=service.url, timeout=600) as http:
        expected = {name: await complete(client, name) for name in ["tiny", *RANKS]}
        num_answers = 0

        async def traffic(name: str) -> None:
            nonlocal num_answers
            while not stop.is_set():
                assert await complete(client, name) == expected[name]
                num_answers += 1

        workers = [asyncio.create_task(traffic(name)) for name in expected]
        texts: dict[str, set[str]] = {}
        for _ in range(2):
            for index in range(6):
                name = f"extra{index}"
                load = await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name})
                assert load.status_code == 200, load.text
                answers = await asyncio.gather(*(complete(client, name) for _ in range(3)))
                texts.setdefault(name, set()).update(answers)
                unload = await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
                assert unload.status_code == 200, unload.text
                for _ in range(2):  # both ingresses
                    with pytest.raises(openai.NotFoundError):
                        await complete(client, name)
        stop.set()
        await asyncio.gather(*workers)
    assert num_answers > 20
    assert all(len(answers) == 1 for answers in texts.values()), "loaded again, an adapter says the same"
    assert len({next(iter(answers)) for answers in texts.values()}) == 6


async def test_a_name_loaded_again_with_new_contents_means_the_new_ones(service: Service) -> None:
    folder = service.loras / "changing"
    async with service.openai() as client, httpx.AsyncClient(base_url=service.url, timeout=600) as http:
        seen = []
        for seed in (1, 2):
            shutil.rmtree(folder, ignore_errors=True)
            save_adapter(folder, rank=8, seed=seed)
            body = {"name": "changing", "path": "changing"}
            seen.append((await http.post("/v1/loras?wait=true", json=body)).raise_for_status().json())
            answers = {await complete(client, "changing") for _ in range(3)}
            assert len(answers) == 1, "every ingress has the same meaning"
            seen[-1]["text"] = answers.pop()
        first, second = seen
        assert second["generation"] == first["generation"] + 1
        assert second["digest"] != first["digest"]
        assert second["text"] != first["text"]
        again = (await http.post("/v1/loras?wait=true", json={"name": "changing", "path": "changing"})).json()
        assert again["generation"] == second["generation"], "the same contents are the same generation"
        assert (await http.get("/v1/loras/changing")).json()["digest"] == second["digest"]
        assert (await http.delete("/v1/loras/changing")).status_code == 200
        assert (await http.delete("/v1/loras/changing")).status_code == 404


async def test_more_adapters_than_rows_all_get_their_turn(service: Service) -> None:
    async with service.openai() as client, httpx.AsyncClient(base_url=service.url, timeout=600) as http:
        names = [f"wide{index}" for index in range(6)]  # 6 * 40 (64 after rounding) rows on replicas of 128
        for index, name in enumerate(names):
            save_adapter(service.loras / name, rank=96, seed=200 + index)
            (await http.post("/v1/loras?wait=true", json={"name": name, "path": name})).raise_for_status()
        together = await asyncio.gather(*(complete(client, name) for name in names * 3))
        alone = [await complete(client, name) for name in names]
        assert together == alone * 3
        assert len(set(alone)) == 6
        for name in names:
            (await http.delete(f"/v1/loras/{name}")).raise_for_status()


async def test_unloading_frees_the_rows(service: Service, handle: Callable[..., Any]) -> None:
    save_adapter(service.loras / "freed", rank=8, seed=77)
    async with service.openai() as client, httpx.AsyncClient(base_url=service.url, timeout=600) as http:
        digest = (await http.post("/v1/loras?wait=true", json={"name": "freed", "path": "freed"})).json()["digest"]
        await complete(client, "freed")
        assert sum(digest in stats["residents"] for stats in handle("replica_stats")) == 1, "on one replica"
        async with asyncio.timeout(60):  # the ingresses hear of it a moment later
            while not (await http.get("/v1/loras/freed")).json()["residency"]["replicas"]:
                await asyncio.sleep(0.05)
        (await http.delete("/v1/loras/freed")).raise_for_status()
        assert not any(digest in stats["residents"] for stats in handle("replica_stats"))


def test_what_a_client_may_not_load(service: Service) -> None:
    outside = service.loras.parent / "outside"
    save_adapter(outside, rank=4, seed=1)
    (service.loras / "link").symlink_to(outside)
    (service.loras / "broken").mkdir()
    cases = {
        "../outside": 403,
        str(outside): 403,
        "/etc": 403,
        "link": 403,
        "absent": 404,
        "broken": 400,
        "": 403,
        "a\0b": 403,
        "ftp://example.com/x": 403,
    }
    with service.http() as http:
        for path, status in cases.items():
            answer = http.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": path})
            assert answer.status_code == status, (path, answer.text)
            assert answer.json()["error"]["message"]
        for name in ("../x", "a:b", "", "tiny", "x" * 129, "a//b"):
            answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "r8"})
            assert answer.status_code == 400, (name, answer.text)
        assert all(item["id"] != "mine" for item in http.get("/v1/loras").json()["data"])
        shown = http.get("/v1/loras/mine").json()
        assert shown["state"] == "FAILED"
        assert "ftp" in shown["reason"]
