"""A head and two workers with networks of their own: an ingress and an engine replica on each, HAProxy on the head.

Clients are on the head. Ray and Serve are started as on machines (`ray start`, the dashboard's REST API). On two busy
cores the start took 85 to 142 s, and a test 35 to 242 s. Nothing may stop the cluster (SIGSTOP) meanwhile.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli.ray_env import HA_PROXY_SWITCHES, RAY_SWITCHES, ha_proxy_places
from app.deployments.rpc.uds_transport import FOLDER_VARIABLE
from load_tests.chaos.__main__ import RANKS
from load_tests.process_tree import processes
from load_tests.service import ROOT, end_session, own_environment
from tests.e2e.network.machines import Network, skip_without_networks
from tests.e2e.process import tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.nightly import mark_folder
from tests.postgres import PostgresServer, find_postgres

NUM_NODES = 3
HTTP_PORT, GCS_PORT = 8000, 6379
URL = f"http://127.0.0.1:{HTTP_PORT}"
#: Where Ray's dashboard takes Serve's settings.
SERVE_URL = "http://127.0.0.1:8265/api/serve/applications/"
START_TIMEOUT_S = 600.0


@pytest.hookimpl(tryfirst=True)  # before nightly tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nightly: they need root, and their requests wait for timeouts."""
    mark_folder(items, __file__, pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800))


class Nodes:
    """The cluster; node 0 is the head. Call all but `session_ids` from the head's network."""

    def __init__(self, network: Network, folder: Path, registry_url: str) -> None:
        self.network = network
        # A short path: Ray makes Unix sockets in it, and their names are limited to 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="pln", dir="/tmp"))
        self.token = secrets.token_hex(32)
        switches = {name: value for name, value, _ in (*RAY_SWITCHES, *HA_PROXY_SWITCHES)}
        self.environment = os.environ | ha_proxy_places() | own_environment(self.folder) | switches
        self.environment |= {
            "OMP_NUM_THREADS": "1",
            "POLYLORA_REGISTRY_URL": registry_url,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
        }
        self.environment.pop("RAY_ADDRESS", None)
        self.document = self._document(folder)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        """Start a node's Ray; returns before it has joined."""
        own = self.folder / str(number)
        with self.network.enter(number) as address, self.log.open("ab") as log:
            head = address.rpartition(".")[0] + ".1"
            role = ("--head", "--port", str(GCS_PORT)) if number == 0 else ("--address", f"{head}:{GCS_PORT}")
            self._processes[number] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *role),
                    *("--node-ip-address", address, "--num-cpus", "1", "--object-store-memory", str(128 << 20)),
                    *("--temp-dir", str(own / "ray")),
                ],
                cwd=ROOT,
                env=self.environment | {FOLDER_VARIABLE: str(own / "s")},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, number: int) -> None:
        """End all of a node's processes at once."""
        end_session(self._processes[number].pid)
        self._processes.pop(number).wait(60)

    def deploy(self) -> None:
        """Send the settings to Serve, which replaces replicas whose settings have changed."""
        headers = {"x-ray-authorization": f"Bearer {self.token}"}
        self._wait(lambda: httpx.get(SERVE_URL, headers=headers, timeout=60).status_code == 200, "dashboard")
        httpx.put(SERVE_URL, json=self.document, headers=headers, timeout=300).raise_for_status()

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            return len(httpx.get(f"{URL}/v1/overview", timeout=10).json().get("replicas", ())) == NUM_NODES

        self._wait(is_ready, "service of all nodes")

    def session_ids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def node_of(self, role: str) -> int | None:
        """The node of the one process of a role (`process_tree.ROLES`)."""
        return next((number for number in self._processes if self.pids(number, role)), None)

    def pids(self, number: int, role: str) -> list[int]:
        """A node's processes of a role."""
        return processes(self._processes[number].pid).get(role, [])

    def stop(self) -> None:
        for number in [*self._processes]:
            self.kill(number)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def log(self) -> Path:
        return self.folder / "ray.log"

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if is_done():
                    return
            except (httpx.TransportError, ValueError) as error:
                last: object = error
            else:
                last = "not yet"
            ended = [number for number, process in self._processes.items() if process.poll() is not None]
            assert not ended, f"nodes {ended} ended:\n{self.log.read_text(errors='replace')[-6000:]}"
            assert time.monotonic() < deadline_s, f"no {what}: {last}"
            time.sleep(0.5)

    def _document(self, folder: Path) -> dict[str, Any]:
        """Rank rows for a few adapters: others are fetched when they are asked for."""
        engine = {"num_kv_blocks": 512, "lora_pool_rows": 40, "cpu": {"num_threads": 1}}
        document = tiny_document(HTTP_PORT, folder, engine, num_replicas=NUM_NODES, preload=[*RANKS])
        document["proxy_location"] = "HeadOnly"
        document["http_options"]["host"] = "0.0.0.0"
        (application,) = document["applications"]
        application["args"]["http"] = {"auth": "open", "management": "open"}
        for deployment in application["deployments"]:
            deployment["max_replicas_per_node"] = 1
        return document


@pytest.fixture(scope="package")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    skip_without_networks()
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL's programs are not installed: several nodes need it")
    folder = tmp_path_factory.mktemp("network")
    save_tiny_model(folder / "model")
    for seed, (name, rank) in enumerate(RANKS.items()):
        save_adapter(folder / "loras" / name, rank=rank, seed=seed)
    with ExitStack() as stack:
        database = PostgresServer(programs)
        stack.callback(database.stop)
        network = stack.enter_context(Network(NUM_NODES))
        started = Nodes(network, folder, database.new_database())
        stack.callback(started.stop)
        with network.enter(0):
            for number in range(NUM_NODES):
                started.start(number)
            started.deploy()
            started.wait_until_ready()
        yield started
