"""A service over vLLM whose processes are killed, stopped and starved: no request is left unanswered, no registration
is lost, and the hot adapters come back. Also more adapters than slots, and a tenant that floods.
"""

from __future__ import annotations

import os
import random
import resource
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from app.config import ADMIN_KEY, SECRETS_KEY
from app.deployments.tenancy.auth.key_crypto import new_key
from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.request import SamplingParams
from app.engine.vllm.worker_process import _running_in
from load_tests.process_tree import processes
from load_tests.service import free_port
from tests.e2e.process import ServiceProcess, polylora_serve, tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.e2e.vllm.test_service import worker_pid
from tests.engine.running import vllm_section

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.vllm]

KEY = new_key(is_admin=True).value
NUM_ADAPTERS, SLOTS, NUM_TOKENS = 200, 8, 8
NAMES = [f"a{index:03}" for index in range(NUM_ADAPTERS)]
PROMPT = "the quick brown"
#: A start of vLLM on a machine that does other things as well.
RESTART_S = 900.0


@dataclass
class Chaos:
    """The service, keys of two projects, and what each model has to answer."""

    process: ServiceProcess
    clients: dict[str, openai.OpenAI]
    expected: dict[str, str]

    def ask(self, model: str, project: str = "one", max_tokens: int = NUM_TOKENS) -> str:
        answer = self.clients[project].completions.create(
            model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    def resident(self) -> int:
        """Adapters on the device, as the service tells operators."""
        status = httpx.get(f"{self.process.url}/v1/status", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        return sum(replica["residents"] for replica in status.raise_for_status().json()["replicas"])

    def names(self) -> set[str]:
        return {model.id for model in self.clients["one"].models.list()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos")
    save_tiny_model(folder / "model", num_heads=2)  # vLLM's attention wants 32 values per head
    for seed, name in enumerate(NAMES):
        save_adapter(folder / "loras" / name, rank=1 + seed % 16, seed=seed)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """By the CPU engine in float32."""
    config = EngineConfig.model_validate({"cpu": {"weight_dtype": "float32", "num_threads": 1}, "num_kv_blocks": 256})
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    models = {"tiny": None} | {name: folder / "loras" / name for name in NAMES}
    with LLM(folder / "model", config) as llm:
        answers = llm.generate([PROMPT] * len(models), list(models.values()), sampling)
    return {model: answer.text for model, answer in zip(models, answers, strict=True)}


@pytest.fixture(scope="module")
def chaos(folder: Path, expected: dict[str, str]) -> Iterator[Chaos]:
    port = free_port()
    section = vllm_section("vllm") | {"max_loras": SLOTS}
    document = tiny_document(port, folder, {"max_num_seqs": 8, "max_step_s": 10.0, "vllm": section})
    environment = {
        "TORCHDYNAMO_DISABLE": "1",
        "POLYLORA_STATE_DIR": str(folder / "state"),
        ADMIN_KEY: KEY,
        SECRETS_KEY: secrets.token_hex(32),
    }
    process = polylora_serve(document, port, environment)
    try:
        process.wait_until_said("Ready after", RESTART_S)
        administering = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", admin_api_key=KEY, max_retries=0)
        projects, clients = administering.admin.organization.projects, {}
        for name in ("one", "flood"):
            account = projects.service_accounts.create(projects.create(name=name).id, name="app")
            assert account.api_key is not None
            clients[name] = administering.with_options(api_key=account.api_key.value, timeout=RESTART_S)
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=process.url, headers=headers, timeout=300) as http:
            for name in NAMES:
                http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name}).raise_for_status()
        yield Chaos(process, clients, expected)
    finally:
        process.stop()


def test_two_hundred_adapters_over_eight_slots(chaos: Chaos) -> None:
    asked = [*chaos.expected, *chaos.expected]
    random.Random(3).shuffle(asked)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(chaos.ask, asked))
    wrong = [model for model, answer in zip(asked, answers, strict=True) if answer != chaos.expected[model]]
    assert wrong == []
    assert chaos.resident() <= SLOTS


def test_a_tenant_does_not_wait_for_another_ones_flood(chaos: Chaos) -> None:
    with ThreadPoolExecutor(48) as threads:
        flood = [threads.submit(chaos.ask, NAMES[index % 4], "flood", 64) for index in range(48)]
        while not any(future.done() for future in flood):
            time.sleep(0.05)
        for model in ("tiny", NAMES[0], NAMES[1]):
            assert chaos.ask(model) == chaos.expected[model]
        num_left = sum(not future.done() for future in flood)
        assert num_left > 16, "it was served before most of the flood"
        for future in flood:
            future.result()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def _starve(pid: int) -> None:
    """The process gets no more address space: whatever it has not yet allocated fails."""
    resource.prlimit(pid, resource.RLIMIT_AS, (0, 0))


def _worker(chaos: Chaos) -> int:
    return worker_pid(chaos.process)


def _core(chaos: Chaos) -> int:
    """vLLM's own process that computes, below the one that hosts it."""
    session = _running_in(worker_pid(chaos.process))
    (core,) = [pid for pid in session if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return core


def _replica(chaos: Chaos) -> int:
    (replica,) = processes(chaos.process.process.pid)["engine"]
    return replica


FAULTS: dict[str, tuple[Callable[[Chaos], int], Callable[[int], None]]] = {
    "kill vLLM's host": (_worker, _kill),
    "kill vLLM's core, as the kernel does without memory": (_core, _kill),
    "kill the replica": (_replica, _kill),
    "stop vLLM's host": (_worker, _stop),
    "stop vLLM's core": (_core, _stop),
    "no more memory for vLLM": (_core, _starve),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost_and_no_request_is_left_unanswered(chaos: Chaos, fault: str) -> None:
    hot = ["tiny", *NAMES[:SLOTS]]
    for model in hot:
        assert chaos.ask(model) == chaos.expected[model]
    time.sleep(3)  # the registry hears of uses once a second
    before, registered = worker_pid(chaos.process), chaos.names()
    find, injure = FAULTS[fault]
    with ThreadPoolExecutor(24) as threads:
        asked = [(hot[index % len(hot)], threads.submit(chaos.ask, hot[index % len(hot)])) for index in range(8)]
        long = [threads.submit(chaos.ask, model, "one", 600) for model in hot]
        time.sleep(1.0)
        injure(find(chaos))
        asked += [(model, threads.submit(chaos.ask, model)) for model in hot]
        for model, future in asked:
            assert _ending(future) in {chaos.expected[model], "503"}
        for future in long:
            assert _ending(future)
    _until_answered(chaos, hot)
    if injure is not _starve:  # vLLM may have all the memory that it needs
        assert worker_pid(chaos.process) != before
    assert chaos.names() == registered >= set(NAMES)
    assert chaos.resident() == SLOTS, "the hot adapters are there again"
    if worker_pid(chaos.process) != before:
        with pytest.raises(ProcessLookupError):
            os.killpg(before, 0)


def _ending(future: Future[str]) -> str:
    """A request's answer, or the status of the error that it got instead; anything else is raised."""
    try:
        return future.result(RESTART_S)
    except openai.APIStatusError as error:
        if error.status_code != 503 or not error.response.json()["error"]["message"]:
            raise
        return "503"


def _until_answered(chaos: Chaos, models: list[str]) -> None:
    deadline_s = time.monotonic() + RESTART_S
    while True:
        try:
            for model in models:
                assert chaos.ask(model) == chaos.expected[model]
            return
        except openai.APIStatusError as error:
            if error.status_code != 503 or time.monotonic() > deadline_s:
                raise
            time.sleep(2)
