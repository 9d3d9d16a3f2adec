"""One `polylora serve` for all tests of this folder: two ingresses, two engine replicas, an admin key, everything told.

Whatever can be written down is: every request, everything that is said at DEBUG, Serve's access log, HAProxy's. Ray's
dashboard runs. The registry is in PostgreSQL where its programs are installed, with a password in its URL.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app.config import ADMIN_KEY, SECRETS_KEY
from app.deployments.tenancy.auth.key_crypto import new_key
from load_tests.service import free_port
from tests.e2e.process import polylora_serve
from tests.e2e.service.conftest import ENGINES, Service, service_document
from tests.nightly import mark_folder
from tests.postgres import PostgresServer, find_postgres

KEY = new_key(is_admin=True).value
#: PostgreSQL lets every process of this machine in, whatever the password.
DATABASE_PASSWORD = f"pw{secrets.token_hex(12)}"
#: Requests that run at once on a replica.
PLACES = 8
RAY_TOKEN = secrets.token_hex(32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_folder(items, __file__, pytest.mark.e2e)


@dataclass(kw_only=True)
class Keyed(Service):
    """Beside the service: where its registry is, and what HAProxy has sent to its log."""

    registry_url: str
    syslog: socket.socket

    def heard(self) -> bytes:
        """What HAProxy has logged since the last call."""
        found = []
        while True:
            try:
                found.append(self.syslog.recv(1 << 16))
            except BlockingIOError:
                return b"\n".join(found)


@pytest.fixture(scope="package")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("tenants")
    with ExitStack() as running, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as syslog:
        syslog.bind(("127.0.0.1", 0))
        syslog.setblocking(False)
        environment = {
            ADMIN_KEY: KEY,
            SECRETS_KEY: secrets.token_hex(32),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": RAY_TOKEN,
            "RAY_SERVE_HAPROXY_LOG_TARGET": f"127.0.0.1:{syslog.getsockname()[1]}",
            **_database(running),
        }
        port = free_port()
        # Few places, so that few streams are enough for tenants to wait.
        document = service_document(folder, port, {**ENGINES["cpu"], "max_num_seqs": PLACES}, 2)
        document["logging_config"] = {"log_level": "DEBUG", "enable_access_log": True, "encoding": "JSON"}
        document["applications"][0]["args"]["logs"] = {"level": "DEBUG", "format": "json", "requests": True}
        process = polylora_serve(document, port, environment, ["--dashboard", "--host", "0.0.0.0"])
        running.callback(process.stop)
        process.wait_until_said("Ready after", 600)
        state = Path(process.environment["POLYLORA_STATE_DIR"])
        url = environment.get("POLYLORA_REGISTRY_URL") or next(
            f"sqlite:///{path}" for path in state.glob("catalog-*.sqlite")
        )
        yield Keyed(process, document, folder / "loras", registry_url=url, syslog=syslog)


def _database(running: ExitStack) -> Mapping[str, str]:
    """Where the registry is, for the service's environment; SQLite's place, which has no password, is in another."""
    programs = find_postgres()
    if programs is None:
        return {}
    server = PostgresServer(programs)
    running.callback(server.stop)
    url = server.new_database()
    return {"POLYLORA_REGISTRY_URL": url.replace("polylora@", f"polylora:{DATABASE_PASSWORD}@", 1)}


def paths_below(folder: Path) -> Iterator[Path]:
    """Files and folders; unlike `Path.rglob`, without an error where a folder vanishes meanwhile."""
    for at, folders, names in os.walk(folder):
        yield from (Path(at) / name for name in (*folders, *names))


def metric_lines(service: Service) -> list[str]:
    """The lines of every node's port of metrics, which Ray writes into a file."""
    files = [path for path in paths_below(service.process.folder) if path.name.startswith("metrics_export_port_")]
    ports = {port for path in files if (port := path.read_text().strip())}
    return [
        line
        for port in sorted(ports)
        for line in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text.splitlines()
    ]
