"""A service in a container whose memory runs out: the kernel ends an engine, and no answer changes."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from load_tests.process_tree import processes
from load_tests.service import free_port
from tests.e2e.process import POLYLORA, ServiceProcess, tiny_document
from tests.e2e.tiny import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]

_GROUPS = Path("/sys/fs/cgroup")
#: Another process of the container, which the kernel must not choose, takes memory until it is told to stop.
_HOG = """
import sys, time
open("/proc/self/oom_score_adj", "w").write("-1000")
held = []
while True:
    held.append(bytearray(b"x" * (8 << 20)))
    print(len(held), flush=True)
    time.sleep(0.2)
"""


class MemoryGroup:
    """A control group, with the files of version 1 or 2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        is_v1 = folder.parent.name == "memory"
        self._limit = folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        self._used = folder / ("memory.usage_in_bytes" if is_v1 else "memory.current")

    def limit(self, num_bytes: int) -> None:
        """Set the limit; -1: none."""
        self._limit.write_text("max" if num_bytes < 0 and self._limit.name == "memory.max" else str(num_bytes))

    @property
    def used_bytes(self) -> int:
        return int(self._used.read_text())

    def command(self, arguments: list[str]) -> list[str]:
        """The command in this group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs; exec "$@"', "sh", *arguments]


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    parent = _GROUPS / "memory" if (_GROUPS / "memory").is_dir() else _GROUPS
    folder = parent / f"polylora-{os.getpid()}"
    if os.geteuid() != 0 or not os.access(parent, os.W_OK) or shutil.which("sh") is None:
        pytest.skip("not root of a machine that has control groups: nothing can limit memory here")
    folder.mkdir()
    try:
        group = MemoryGroup(folder)
        if not group._limit.exists():
            pytest.skip(f"{parent} gives its groups no limit of memory")
        yield group
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # its last processes end
                time.sleep(0.1)


@pytest.fixture
def service(group: MemoryGroup, tmp_path: Path) -> Iterator[ServiceProcess]:
    save_tiny_model(tmp_path / "model")
    (tmp_path / "loras").mkdir()
    port = free_port()
    document = tiny_document(port, tmp_path, {"cpu": {"num_threads": 1}, "num_kv_blocks": 256, "lora_pool_rows": 16})
    document["applications"][0]["deployments"] = [
        {"name": "Ingress", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
        {"name": "EngineReplica", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}},
    ]
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    command = group.command([*POLYLORA, "serve", "--config", str(path)])
    # Ray's own watch looks at the whole machine, or at the container that it is in.
    environment = {"POLYLORA_STATE_DIR": str(tmp_path / "state"), "RAY_memory_monitor_refresh_ms": "0"}
    process = ServiceProcess(command, port, environment)
    try:
        process.wait_until_said("Ready after", 600)
        yield process
    finally:
        process.stop()


async def text_of(http: httpx.AsyncClient, seed: int) -> str:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": "the quick",
        "max_tokens": 900,
        "seed": seed,
        "temperature": 0.9,
    }
    answer = await http.post("/v1/completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def test_an_engine_that_the_kernel_ends_changes_no_answer(service: ServiceProcess, group: MemoryGroup) -> None:
    def engines() -> set[int]:
        return set(processes(service.process.pid).get("engine", ()))

    async with httpx.AsyncClient(base_url=service.url, timeout=600) as http:
        alone = [await text_of(http, seed) for seed in range(8)]
        before = engines()
        assert len(before) == 2
        tasks = [asyncio.create_task(text_of(http, seed)) for seed in range(8)]
        await asyncio.sleep(0.2)
        group.limit(group.used_bytes + (64 << 20))
        hog = await asyncio.to_thread(
            subprocess.Popen, group.command([sys.executable, "-c", _HOG]), stdout=subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(120):
                while before <= engines():
                    await asyncio.sleep(0.05)
        finally:
            hog.kill()
            hog.wait()
            group.limit(-1)
        assert await asyncio.gather(*tasks) == alone
        async with asyncio.timeout(300):
            while len(engines()) < 2 or (await http.get("/health")).status_code != 200:
                await asyncio.sleep(0.5)
        assert [await text_of(http, seed) for seed in range(8)] == alone
