"""Three Ray nodes on this machine, an ingress and an engine replica on each, one PostgreSQL for the registry."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from app.cli.ray_env import RAY_SWITCHES
from load_tests.process_tree import processes
from load_tests.service import ROOT, end_session, free_port, own_environment
from tests.e2e.process import tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.nightly import mark_folder
from tests.postgres import PostgresServer, find_postgres
from tests.redis_server import RedisServer, find_redis

NUM_NODES = 3
RANKS = {"r8": 8, "r16": 16}
#: How long a node may be without an ingress that listens, seconds.
INGRESS_TIMEOUT_S = 120.0


@pytest.hookimpl(tryfirst=True)  # before nightly tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nightly: by day tests/e2e/service has two ingresses and replicas, one of which is killed, on one node."""
    mark_folder(items, __file__, pytest.mark.e2e, pytest.mark.nightly)


@dataclass(frozen=True)
class Node:
    """A node of the cluster, by its raylet, whose children are all processes that work there."""

    raylet: int

    def processes(self) -> list[int]:
        """The raylet, and what it has started."""
        found, new = [self.raylet], [self.raylet]
        children = _children()
        while new:
            new = [child for parent in new for child in children.get(parent, [])]
            found += new
        return found

    def send(self, number: signal.Signals) -> None:
        """To every process of the node."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class NodesOfOneMachine:
    """The cluster, started by a process of its own (`operate`), and what is known of it."""

    def __init__(self, document: dict[str, Any], environment: dict[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pln", dir="/tmp"))
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # as for any cluster of machines
        self.environment = os.environ | own_environment(self.folder) | token | environment
        self.environment.pop("RAY_ADDRESS", None)
        path = self.folder / "serve.yaml"
        path.write_text(yaml.safe_dump(document))
        self._log = (self.folder / "operate.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.cluster.operate", str(path), str(NUM_NODES)],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self.gcs: int | None = None
        self.nodes: list[Node] = []
        self._hear()

    def do(self, what: str) -> dict[str, Any]:
        """What `operate.Operated.do` does; returns when that is done, with what it says."""
        commands: IO[bytes] | None = self.process.stdin
        assert commands is not None
        commands.write(f"{what}\n".encode())
        commands.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        """What there is now, as `operate` says it: all nodes that were not removed, the head first if there is one."""
        output: IO[bytes] | None = self.process.stdout
        assert output is not None
        line = output.readline()
        assert line.startswith(b"{"), f"the cluster does not run: {line!r}\n{self.tail()}"
        found: dict[str, Any] = json.loads(line)
        self.gcs = next(iter(found["gcs"]), None)
        self.nodes = [Node(raylet) for raylet in found["raylets"]]
        return found

    def tail(self) -> str:
        return (self.folder / "operate.log").read_text(errors="replace")[-6000:]

    async def ingress_url(self, node: Node) -> str:
        """Where the ingress of a node listens: each serves HTTP itself.

        It waits for one: Serve ends the ingress of a node that was silent for long (30 s a check), and starts another.
        """
        async with asyncio.timeout(INGRESS_TIMEOUT_S):
            while True:
                ours = set(node.processes())
                pids = [pid for pid in processes(self.process.pid)["ingress"] if pid in ours]
                ports = {port for pid in pids for port in self._listening(pid)}
                if len(ports) == 1:
                    return f"http://127.0.0.1:{ports.pop()}"
                await asyncio.sleep(0.5)

    def node_of(self, role: str) -> Node:
        """The node on which the one process of a role (`process_tree.ROLES`) runs."""
        (pid,) = processes(self.process.pid)[role]
        return next(node for node in self.nodes if pid in node.processes())

    def stop(self) -> None:
        for node in self.nodes:
            node.send(signal.SIGCONT)
        end_session(self.process.pid)
        self.process.wait(120)
        for stream in (self.process.stdin, self.process.stdout, self._log):
            assert stream is not None
            stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _listening(self, pid: int) -> set[int]:
        """Ports for ingresses on which a process listens."""
        first, last = (int(self.environment[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"]) for end in ("MIN", "MAX"))
        inodes = set()
        with suppress(FileNotFoundError):  # a process may end, and close files, meanwhile
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        ports = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == "0A" and fields[9] in inodes and first <= port <= last:
                ports.add(port)
        return ports


@contextmanager
def started_cluster(folder: Path, environment: dict[str, str]) -> Iterator[NodesOfOneMachine]:
    """The application on `NUM_NODES` nodes, whose processes have this environment, too; its files are in the folder."""
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL's programs are not installed: several nodes need it")
    save_tiny_model(folder / "model")
    for seed, (name, rank) in enumerate(RANKS.items()):
        save_adapter(folder / "loras" / name, rank=rank, seed=seed)
    document = _document(folder)
    database = PostgresServer(programs)
    try:
        switches = {name: value for name, value, _ in RAY_SWITCHES}
        started = NodesOfOneMachine(
            document,
            {
                **switches,
                "OMP_NUM_THREADS": "1",
                "POLYLORA_REGISTRY_URL": database.new_database(),
                "RAY_SERVE_ENABLE_HA_PROXY": "0",
                "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
                **environment,
            },
        )
        try:
            yield started
        finally:
            started.stop()
    finally:
        database.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesOfOneMachine]:
    with started_cluster(tmp_path_factory.mktemp("cluster"), {}) as started:
        yield started


@pytest.fixture
def lasting_cluster(tmp_path: Path) -> Iterator[NodesOfOneMachine]:
    """One whose head finds its state in Redis when it returns."""
    program = find_redis()
    if program is None:
        pytest.skip("redis-server is not installed: a head that returns needs it")
    server = RedisServer(program)
    try:
        with started_cluster(tmp_path, {"RAY_REDIS_ADDRESS": server.address}) as started:
            yield started
    finally:
        server.stop()


def _document(folder: Path) -> dict[str, Any]:
    engine = {"num_kv_blocks": 512, "lora_pool_rows": 64, "cpu": {"num_threads": 1}}
    document = tiny_document(free_port(), folder, engine, num_replicas=NUM_NODES)
    document["proxy_location"] = "HeadOnly"
    for deployment in document["applications"][0]["deployments"]:
        deployment["max_replicas_per_node"] = 1
    return document


def _children() -> dict[int, list[int]]:
    """Process ids by their parents'."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, FileNotFoundError, ProcessLookupError):
            pid = int(entry.name)
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    return children
