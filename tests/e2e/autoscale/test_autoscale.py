"""Engine replicas come when there is none, or too much to compute, and go again; no answer is lost or changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from load_tests.process_tree import session_processes
from load_tests.service import free_port
from tests.e2e.process import ServiceProcess, serve_run, tiny_document
from tests.e2e.tiny import save_tiny_model

#: By day tests/deployments/placement/test_autoscaling.py decides; tests/simulation/test_scaling.py scales like Serve.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

SCALING = {
    "min_replicas": 0,
    "max_replicas": 2,
    "look_back_period_s": 11,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1,
    "policy": {
        "policy_function": "app.deployments.placement.autoscaling:AdapterDemand",
        "policy_kwargs": {"target_drain_s": 0.05, "forecast_s": 2, "scale_down_window_s": 10},
    },
}
#: What `polylora serve` sets.
SWITCHES = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR": "0.05",
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}',
}
BODY = {"model": "tiny", "prompt": "the quick", "max_tokens": 64, "temperature": 0, "ignore_eos": True}


class Clients:
    """Send the same request again and again, side by side, and keep every answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._leave = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers: list[str] = []
        self.errors: list[str] = []

    def start(self, count: int) -> None:
        new = [threading.Thread(target=self._ask) for _ in range(count)]
        self._threads += new
        for thread in new:
            thread.start()

    def stop(self) -> None:
        self._leave.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=300) as client:
            while not self._leave.is_set():
                answer = client.post(f"{self._url}/v1/completions", json=BODY)
                if answer.status_code == 200:
                    self.answers.append(answer.json()["choices"][0]["text"])
                else:
                    self.errors.append(answer.text)


def test_replicas_follow_the_work(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    (tmp_path / "loras").mkdir()
    port = free_port()
    document = tiny_document(port, tmp_path, {"cpu": {"num_threads": 1}, "num_kv_blocks": 512, "lora_pool_rows": 16})
    engines = document["applications"][0]["deployments"][1]
    del engines["num_replicas"]
    engines["autoscaling_config"] = SCALING
    document["applications"][0]["args"] |= {
        "http": {"ready_at_zero_replicas": True},
        "limits": {"replica_timeout_s": 300},
    }
    process = serve_run(document, port, SWITCHES | {"POLYLORA_STATE_DIR": str(tmp_path / "state")})
    crowd, one = Clients(process.url), Clients(process.url)
    try:
        process.wait_until_healthy(600)
        assert _probe(process) == "asleep"
        assert _num_engines(process) == 0
        crowd.start(24)  # the first of them has a replica started, and all wait for it
        _wait_until(lambda: _num_engines(process) == 2, 600, process)
        time.sleep(3.0)  # the second one serves, too
        one.start(1)
        crowd.stop()
        _wait_until(lambda: _num_engines(process) == 1, 600, process)
        num_answers = len(one.answers)
        _wait_until(lambda: len(one.answers) > num_answers + 3, 600, process)
        one.stop()
        _wait_until(lambda: _num_engines(process) == 0 and _probe(process) == "asleep", 600, process)
        answer = httpx.post(f"{process.url}/v1/completions", json=BODY, timeout=300)
        one.answers.append(answer.json()["choices"][0]["text"])
        decisions = httpx.get(f"{process.url}/v1/status", timeout=60).json()["scaling_decisions"]
    finally:
        crowd.stop()
        one.stop()
        process.stop()
    assert crowd.errors + one.errors == []
    assert len(set(crowd.answers + one.answers)) == 1
    reasons = {(each["prev_num_replicas"], each["target_num_replicas"]): each["reason"] for each in decisions}
    assert reasons.keys() >= {(0, 1), (1, 2), (1, 0)}, "Serve's controller sent them"
    assert reasons[0, 1] == "waiting requests"
    assert all(each["deployment"] == "EngineReplica" and each["needed_replicas"] >= 0 for each in decisions)


def _probe(process: ServiceProcess) -> str:
    """What the service says of its readiness."""
    return str(httpx.get(f"{process.url}/readyz", timeout=60).json()["status"])


def _num_engines(process: ServiceProcess) -> int:
    """Replicas by their processes' titles."""
    return sum("EngineReplica" in command for command in _commands(process))


def _commands(process: ServiceProcess) -> list[str]:
    commands = []
    for pid in session_processes(process.process.pid):
        try:
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has just ended
            continue
    return commands


def _wait_until(holds: Callable[[], Any], timeout_s: float, process: ServiceProcess) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, process.tail()
        time.sleep(0.3)
