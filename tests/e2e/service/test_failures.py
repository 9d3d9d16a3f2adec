"""Clients that leave, replicas and actors that die, configurations that change: no answer is lost or altered."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest

from load_tests.service import ROOT
from tests.e2e.service.conftest import RANKS, Service, num_socket_links
from tests.e2e.service.test_openai_client import run

Handle = Callable[..., Any]


def long_request(model: str, seed: int, max_tokens: int = 300) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": f"the quick {seed}",
        "max_tokens": max_tokens,
        "temperature": 0.9,
        "seed": seed,
        "logprobs": 1,
        "extra_body": {"ignore_eos": True},
    }


def idle(handle: Handle) -> bool:
    stats = handle("replica_stats")
    return len(stats) == 2 and all(
        item["num_running"] == item["num_waiting"] == 0
        and item["num_blocks_free"] == item["num_blocks"]
        and not item["in_use"]
        for item in stats
    )


async def until(condition: Callable[[], bool], timeout_s: float = 600) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.1)


async def when_the_store_is_back(ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """The answer of the registry's process, which may be restarting: until it is back there is a 503."""
    deadline_s = time.monotonic() + 600
    while (answer := await ask()).status_code == 503:
        assert time.monotonic() < deadline_s, answer.text
        await asyncio.sleep(float(answer.headers["retry-after"]))
    return answer.raise_for_status()


async def test_frames_come_through_sockets(service: Service, handle: Handle) -> None:
    assert await num_socket_links(service, handle) > 0


@pytest.mark.parametrize("streams", [True, False])
async def test_a_disconnect_frees_blocks_and_pins(service: Service, handle: Handle, streams: bool) -> None:
    def num_aborted() -> int:
        return sum(stats["num_aborted"] for stats in handle("replica_stats"))

    def is_running() -> bool:
        return sum(stats["num_running"] for stats in handle("replica_stats")) > 0

    # Sixteen long answers: some seconds of work, whatever the machine.
    body = {"model": "r8", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "n": 16, "stream": streams}
    await until(lambda: idle(handle))
    before = num_aborted()
    async with httpx.AsyncClient(base_url=service.url, timeout=600) as http:
        if streams:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    break
        else:
            answer = asyncio.create_task(http.post("/v1/completions", json=body))
            await until(is_running)
            answer.cancel()
            await asyncio.wait([answer])
    await until(lambda: idle(handle))
    assert num_aborted() == before + 16, "sixteen sequences of a client that left were computed to their end"


async def busy_replica(handle: Handle, tasks: Sequence[asyncio.Task[Any]], num_running: int) -> dict[str, Any] | None:
    """A replica seen with so many requests running; None if the tasks ended unseen."""
    while not all(task.done() for task in tasks):
        for stats in await asyncio.to_thread(handle, "replica_stats"):
            if stats["num_running"] >= num_running:
                return dict(stats)
        await asyncio.sleep(0.02)
    return None


async def test_a_killed_replica_changes_no_token(service: Service, handle: Handle) -> None:
    requests = [long_request(model, seed, 600) for seed, model in enumerate(["tiny", *RANKS] * 3)]
    async with service.openai() as client:
        alone = [await run(client, request) for request in requests]
        busy = None
        while busy is None:  # a machine fast enough to finish unseen does it all again
            tasks = [asyncio.create_task(run(client, request)) for request in requests]
            busy = await busy_replica(handle, tasks, num_running=3)
            if busy is not None:
                os.kill(busy["pid"], signal.SIGKILL)
            together = await asyncio.gather(*tasks)
            for request, one, many in zip(requests, alone, together, strict=True):
                assert one == many, request["model"]
        pids = {item["pid"] for item in handle("replica_stats")}
        assert busy["pid"] not in pids
        await until(lambda: idle(handle))


@pytest.mark.usefixtures("handle")
async def test_placement_and_store_may_die(service: Service) -> None:
    import ray

    async with service.openai() as client:
        requests = [long_request(model, seed, 60) for seed, model in enumerate(["tiny", *RANKS])]
        alone = [await run(client, request) for request in requests]
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        ours = [name for name in names if name.startswith(("placement-", "adapter-store-"))]
        assert len(ours) == 2
        for name in ours:
            ray.kill(ray.get_actor(name, namespace="polylora"), no_restart=False)
        for _ in range(5):
            assert await asyncio.gather(*(run(client, request) for request in requests)) == alone
            await asyncio.sleep(0.5)
        async with httpx.AsyncClient(base_url=service.url, timeout=600) as http:
            for _ in range(2):
                listed = (await http.get("/v1/loras")).json()["data"]
                assert set(RANKS) <= {entry["id"] for entry in listed}, "the registry is on disk"
            later = {"name": "later", "path": "r8"}
            await when_the_store_is_back(lambda: http.post("/v1/loras?wait=true", json=later))
            await when_the_store_is_back(lambda: http.delete("/v1/loras/later"))


def test_another_ray_job_uses_the_handle(service: Service) -> None:
    environment = service.process.environment | {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    service.process.announce_cluster()
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ray_job.py"), "the quick", "r8"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines() if not line.startswith("many"))
    many = [line for line in result.stdout.splitlines() if line.startswith("many")]
    assert set(RANKS) <= set(lines["adapters"].split(", "))
    assert lines["one"].startswith(lines["stream"]), "the stream adds up to the whole"
    assert many[1] == f"many: r8 {lines['stream']}"
    assert many[0].startswith("many: None")
    assert many[0] != many[1]
    assert lines["chat"] == lines["chat stream"]
    assert all(float(logprob) <= 0 for logprob in lines["log-probabilities"].split())
    assert 1 <= len(lines["token ids"].split()) <= 8
    assert lines["error"].endswith(
        "model_not_found: there is no model or adapter 'no such adapter'; GET /v1/models lists what there is"
    )


async def test_the_handle_answers_as_the_routes(service: Service, handle: Handle) -> None:
    """Several adapters by weight, log-probabilities of a prompt, token ids; and an adapter that it registers."""
    parts = [{"name": "r8", "weight": 0.8}, {"name": "r16", "weight": -0.6}]
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    wanted = fields | {"adapters": parts, "prompt_logprobs": 1, "return_token_ids": True}
    with service.http() as http:
        routed = http.post("/v1/completions", json={"model": "tiny", "prompt": "the quick", **wanted}).json()
        called = await asyncio.to_thread(lambda: handle("complete", "the quick", **wanted))
        assert called["choices"] == routed["choices"]
        loaded = handle("load", "mixed", combine={"adapters": parts}, description="both", pinned=True)
        assert (loaded["state"], loaded["description"], loaded["pinned"]) == ("LOADED", "both", True)
        named = handle("complete", "the quick", "mixed", **fields, return_token_ids=True)
        assert named["choices"][0]["token_ids"] == routed["choices"][0]["token_ids"]
        handle("unload", "mixed")
        with pytest.raises(LookupError, match="model_not_found"):
            handle("chat", [{"role": "user", "content": "hi"}], "mixed")
        with pytest.raises(ValueError, match="frobnicate"):
            handle("chat", [{"role": "user", "content": "hi"}], frobnicate=1)


async def test_a_rolling_update_fails_no_request(service: Service, handle: Handle) -> None:
    """Old and new replicas at once, and they find the same actors."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    document = copy.deepcopy(service.document)
    application = document["applications"][0]
    application["args"]["engine"]["max_num_batched_tokens"] = 128
    before = {item["replica_id"] for item in handle("replica_stats")}
    requests = [long_request(model, seed, 150) for seed, model in enumerate(["tiny", *RANKS])]
    async with service.openai() as client:
        alone = [await run(client, request) for request in requests]
        stop = asyncio.Event()
        num_answers = 0

        async def traffic(index: int) -> None:
            nonlocal num_answers
            while not stop.is_set():
                assert await run(client, requests[index]) == alone[index]
                num_answers += 1

        workers = [asyncio.create_task(traffic(index)) for index in range(len(requests))]
        await asyncio.to_thread(
            _get_global_client().deploy_apps, ServeDeploySchema.model_validate(document), _blocking=False
        )

        def updated() -> bool:
            if any(worker.done() for worker in workers):
                return True
            if serve.status().applications["polylora"].status != "RUNNING":
                return False
            replicas = handle("replica_stats")  # of an ingress that may have seen one of them yet
            return len(replicas) == 2 and before.isdisjoint(item["replica_id"] for item in replicas)

        try:
            await until(updated)
        finally:
            stop.set()
        await asyncio.gather(*workers)
    assert num_answers >= len(requests)


@pytest.mark.nightly
async def test_a_drained_replica_is_replaced_and_no_request_fails(service: Service, handle: Handle) -> None:
    """In every run tests/deployments/ingress/http/routes/test_replicas.py drains a replica without Ray."""
    requests = [long_request(model, seed, 600) for seed, model in enumerate(["tiny", *RANKS] * 3)]
    has_replaced = asyncio.Event()
    answers: list[httpx.Response] = []

    async def keep_asking() -> None:
        async with httpx.AsyncClient(base_url=service.url, timeout=600) as http:
            while not has_replaced.is_set():
                body = {"model": "r8", "prompt": "x", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
                answers.append(await http.post("/v1/completions", json=body))

    await until(lambda: idle(handle))
    async with service.openai() as client, httpx.AsyncClient(base_url=service.url, timeout=600) as http:
        alone = [await run(client, request) for request in requests]
        asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
        busy = None
        while busy is None:  # a machine fast enough to finish unseen does it all again
            tasks = [asyncio.create_task(run(client, request)) for request in requests]
            busy = await busy_replica(handle, tasks, num_running=3)
        replica_id = busy["replica_id"]
        assert (await http.post(f"/v1/replicas/{replica_id}/drain")).status_code == 202
        assert (await http.post(f"/v1/replicas/{replica_id}/drain")).status_code == 409

        async def states() -> dict[str, str]:
            return {each["id"]: each["state"] for each in (await http.get("/v1/overview")).json()["replicas"]}

        deadline_s = time.monotonic() + 600
        while (found := await states()).get(replica_id) != "draining":
            assert time.monotonic() < deadline_s, found
        assert await asyncio.gather(*tasks) == alone, "they end where they are, or continue elsewhere"
        while [*(found := await states()).values()] != ["running"] * 2 or replica_id in found:
            assert time.monotonic() < deadline_s, found
            await asyncio.sleep(0.2)
        await asyncio.sleep(3.0)  # the new one has requests too
        has_replaced.set()
        await asyncio.gather(*asking)
        audit = (await http.get(f"/v1/audit?name={replica_id}")).json()["data"]
    # What was refused is recorded too, if placement did not know yet that the replica drains.
    assert {each["action"] for each in audit} == {"drain replica"}
    assert 1 <= len(audit) <= 2
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert replica_id not in {item["replica_id"] for item in handle("replica_stats")}
    await until(lambda: idle(handle))
