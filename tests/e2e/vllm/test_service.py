"""A service whose engine is vLLM: the official client uses it, its worker dies, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from load_tests.process_tree import session_processes
from load_tests.service import free_port
from tests.e2e.process import ServiceProcess, polylora_serve, tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.engine.running import vllm_section

#: By day tests/engine/vllm has the engine with a worker that computes without a model.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.vllm]

RANKS = {"a": 4, "b": 8, "c": 16}
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "color": {"enum": ["red", "blue"]}},
    "required": ["count", "color"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "the quick brown"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("service")
    save_tiny_model(folder / "model", num_heads=2)  # vLLM's attention wants 32 values per head
    for seed, (name, rank) in enumerate(RANKS.items()):
        save_adapter(folder / "loras" / name, rank=rank, seed=seed)
    port = free_port()
    document = tiny_document(port, folder, {"max_num_seqs": 8, "vllm": vllm_section("vllm")}, preload=["a", "b"])
    environment = {"TORCHDYNAMO_DISABLE": "1", "POLYLORA_STATE_DIR": str(folder / "state")}
    process = polylora_serve(document, port, environment)
    try:
        process.wait_until_healthy(800)
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def answer(client: openai.OpenAI, model: str, **options: Any) -> str:
    options = {"max_tokens": 12, "temperature": 0, **options}
    content = client.chat.completions.create(model=model, messages=MESSAGES, **options).choices[0].message.content
    assert isinstance(content, str)
    return content


def change(service: ServiceProcess, verb: str, name: str) -> httpx.Response:
    body = {"lora_name": name, "lora_path": name} if verb == "load" else {"lora_name": name}
    return httpx.post(f"{service.url}/v1/{verb}_lora_adapter", json=body, timeout=300)


def worker_pid(service: ServiceProcess) -> int:
    """The process that hosts vLLM, in a session of its own below one of the service's processes."""
    parents = set(session_processes(service.process.pid))
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"vllm/worker.py" in command and parent in parents:
            return int(entry.name)
    raise AssertionError(f"no process hosts vLLM:\n{service.tail()}")


def test_the_official_client_gets_what_it_asks_for(client: openai.OpenAI) -> None:
    answers = {model: answer(client, model) for model in ("tiny", "a", "b")}
    assert len(set(answers.values())) == 3
    stream = client.chat.completions.create(model="a", messages=MESSAGES, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == answers["a"]
    options: dict[str, Any] = {"max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 2, "seed": 3}
    options["extra_body"] = {"ignore_eos": True}
    choices = client.chat.completions.create(model="b", messages=MESSAGES, **options).choices
    assert len(choices) == 2
    for choice in choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 5
    schema = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}
    found = json.loads(answer(client, "a", max_tokens=200, response_format=schema))
    assert 0 <= found["count"] <= 99
    assert found["color"] in {"red", "blue"}
    tool: Any = {"type": "function", "function": {"name": "paint", "strict": True, "parameters": SCHEMA}}
    choice = client.chat.completions.create(
        model="a", messages=MESSAGES, max_tokens=300, temperature=0, tools=[tool], tool_choice="required"
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    with pytest.raises(openai.BadRequestError, match="embed"):
        client.embeddings.create(model="a", input="x")


def test_adapters_come_and_go_under_traffic(service: ServiceProcess, client: openai.OpenAI) -> None:
    expected = {model: answer(client, model) for model in ("tiny", "a", "b")}
    with ThreadPoolExecutor(3) as threads:
        traffic = [(model, threads.submit(answer, client, model)) for _ in range(8) for model in expected]
        for _ in range(2):
            assert change(service, "load", "c").status_code == 200  # now each batch has the base and adapters
            assert answer(client, "c") not in expected.values()
            assert change(service, "unload", "c").status_code == 200
            with pytest.raises(openai.NotFoundError):
                answer(client, "c")
        assert [future.result() for _, future in traffic] == [expected[model] for model, _ in traffic]


def test_a_killed_worker_is_replaced_and_its_adapters_come_back(service: ServiceProcess, client: openai.OpenAI) -> None:
    expected = {model: answer(client, model) for model in ("tiny", "a", "b")}
    before = worker_pid(service)
    stream = client.chat.completions.create(
        model="a", messages=MESSAGES, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(before, signal.SIGKILL)
    # A start takes longer than a request waits for a replica.
    with pytest.raises(openai.APIError, match=r"vLLM|no engine replica became ready"):
        for _ in stream:
            pass
    deadline_s = time.monotonic() + 600
    while True:
        try:
            assert {model: answer(client, model) for model in expected} == expected
            break
        except openai.APIStatusError as error:
            if error.status_code != 503 or time.monotonic() > deadline_s:
                raise
            time.sleep(2)
    assert worker_pid(service) != before


def test_an_interrupt_leaves_nothing(service: ServiceProcess) -> None:
    """The last test: it ends the service."""
    pid = worker_pid(service)
    assert service.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("polylora-vllm-")]
