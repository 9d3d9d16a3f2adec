"""Everything is killed while it works, and started again: nothing is registered by hand, and the hot set is warm."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.deployments.registry.last_used import WRITE_INTERVAL_S
from load_tests.process_tree import session_processes
from load_tests.service import free_port
from tests.e2e.process import ServiceProcess, polylora_serve, serve_run, tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model

#: By day tests/e2e/service/test_failures.py kills the store, whose registry is on disk, and
#: tests/deployments/replica/test_warm_up.py warms a replica with the pinned and the hottest.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

PROMPT = {"prompt": "the quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def start(folder: Path) -> ServiceProcess:
    """Adapter slots for two of the three adapters; by their ranks alone, rank rows for two as well."""
    port = free_port()
    engine = {"cpu": {"num_threads": 1}, "num_kv_blocks": 64, "lora_pool_rows": 16, "max_loras": 3}
    document = tiny_document(port, folder, engine)
    process = serve_run(document, port, {"POLYLORA_STATE_DIR": str(folder / "state")})
    process.wait_until_healthy(600)
    return process


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def complete(http: httpx.Client, model: str) -> str:
    answer = http.post("/v1/completions", json=PROMPT | {"model": model})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def residents(http: httpx.Client, name: str) -> int:
    """Replicas whose device holds an adapter."""
    return len(http.get(f"/v1/loras/{name}").json()["residency"]["replicas"])


def test_killed_under_load_and_started_again(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    for seed, name in enumerate("abc"):
        save_adapter(tmp_path / "loras" / name, rank=8, seed=seed)
    process = start(tmp_path)
    with httpx.Client(base_url=process.url, timeout=600) as http:
        for name in "abc":
            loaded = http.post("/v1/loras", json={"name": name, "path": name, "wait": True, "pinned": name == "c"})
            assert loaded.status_code == 201, loaded.text
        until(lambda: residents(http, "c") == 1)  # before anybody asked for it
        refused = http.patch("/v1/loras/a", json={"pinned": True})
        assert refused.status_code == 400, refused.text
        assert "would take 16 rank rows and may take 8" in refused.text
        http.put("/v1/aliases/app", json={"targets": {"a": 1}}).raise_for_status()
        http.post("/v1/loras", json={"name": "bad", "path": "absent", "wait": True})
        texts: dict[str, str] = {}
        for name in ("tiny", "c", "a", "b"):  # b is the hottest, c is pinned
            texts[name] = complete(http, name)
            time.sleep(1.1)  # times of use are whole seconds
        until(lambda: [residents(http, name) for name in "abc"] == [0, 1, 1])

        def used() -> list[int]:
            return [http.get(f"/v1/loras/{name}").json()["last_used"] or 0 for name in "cab"]

        until(lambda: 0 < used()[0] < used()[1] < used()[2])
        before: dict[str, Any] = http.get("/v1/loras").json()
        num_tokens = 0

        def stream_forever() -> None:
            nonlocal num_tokens
            body = PROMPT | {"model": "b", "max_tokens": 900, "stream": True}
            while True:
                with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=600) as response:
                    for line in response.iter_lines():
                        num_tokens += line.startswith("data: {")

        def load() -> None:
            with pytest.raises(httpx.TransportError):
                stream_forever()

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: num_tokens > 20)
        time.sleep(WRITE_INTERVAL_S + 5.0)  # so old may be what the registry's file says of use
        process.kill_everything()
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive()

    process = start(tmp_path)
    try:
        with httpx.Client(base_url=process.url, timeout=600) as http:
            answers: dict[str, httpx.Response] = {}

            def all_answer() -> bool:  # 503 with Retry-After while the registry's process is not reached
                answers.update({name: http.get(f"/v1/loras/{name}") for name in "abc"})
                return all(answer.status_code != 503 for answer in answers.values())

            until(all_answer)
            shown = {name: answer.json() for name, answer in answers.items()}
            assert [entry.get("state") for entry in shown.values()] == ["LOADED"] * 3, shown
            resident = {name: len(entry["residency"]["replicas"]) for name, entry in shown.items()}
            assert resident == {"a": 0, "b": 1, "c": 1}, "ready means that the pinned and the hottest are on the device"
            assert http.get("/v1/loras").json() == before
            assert http.get("/v1/loras/c").json()["pinned"]
            assert "absent" in http.get("/v1/loras/bad").json()["reason"]
            assert {name: complete(http, name) for name in texts} == texts
            assert complete(http, "app") == texts["a"]
            until(lambda: [residents(http, name) for name in "abc"] == [1, 0, 1])
            http.patch("/v1/loras/c", json={"pinned": False}).raise_for_status()

            def has_left() -> bool:  # the replica hears of it in a moment
                complete(http, "a")
                complete(http, "b")
                return residents(http, "c") == 0

            until(has_left)
            events = http.get("/v1/events", params={"name": "b"}).json()["data"]
            assert [event["event"] for event in events].count("loaded to device") >= 1
    finally:
        process.stop()


@pytest.mark.parametrize("kind", ["gcs_server", "raylet"])
def test_polylora_serve_ends_when_its_ray_has_ended(kind: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    (tmp_path / "loras").mkdir()
    port = free_port()
    process = polylora_serve(tiny_document(port, tmp_path, {"num_kv_blocks": 64}), port)
    try:
        process.wait_until_said("Ready after", 600)
        pids = [pid for pid in session_processes(process.process.pid) if program(pid) == kind]
        assert len(pids) == 1
        os.kill(pids[0], signal.SIGKILL)
        assert process.process.wait(120) == 1
        assert f"Ray's {kind} has ended" in process.tail()
    finally:
        process.stop()


def program(pid: int) -> str:
    """The name of the file that a process runs; none of one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name
    return ""
