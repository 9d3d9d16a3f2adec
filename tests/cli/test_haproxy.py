"""What `polylora-haproxy` makes of Ray's configuration, as the real HAProxy serves it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from app.cli import haproxy_supervisor
from app.cli.haproxy import UnknownConfiguration, error_answer, haproxy_binary, rewritten
from app.cli.haproxy_supervisor import SERVE_PID, Supervisor, bound_socket, end_haproxys
from app.cli.ray_env import HA_PROXY_SWITCHES, MAX_HEAD_BYTES, connections_for_files, ha_proxy_places, has_ha_proxy
from app.config import INGRESS_DRAIN_MARGIN_S, LimitsConfig
from load_tests.service import free_port

pytestmark = pytest.mark.skipif(not has_ha_proxy(), reason="Ray's HAProxy is for Linux only")

#: Ray's own code writes the configuration, with an application's ingresses on these ports (none: it is starting).
WRITE = """if True:
    import sys
    from pathlib import Path
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions
    folder, port, *ports = sys.argv[1:]
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=int(port)), socket_path=f"{folder}/admin.sock",
        server_state_base=folder, server_state_file=f"{folder}/state", metrics_socket_path=f"{folder}/metrics.sock",
        metrics_enabled=False,
    )
    api = HAProxyApi(cfg=config, config_file_path=f"{folder}/haproxy.cfg")
    servers = [ServerConfig(f"s{port}", "127.0.0.1", int(port)) for port in ports]
    fallback = ServerConfig("fallback", "127.0.0.1", 33333)
    backend = BackendConfig("http-polylora", "/", servers=servers, fallback_server=fallback, app_name="polylora")
    api.set_backend_configs({backend.name: backend} if ports else {})
    api._generate_config_file_internal()
    Path(folder, "state").touch()
"""


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What Ray writes in folder FOLDER for port 11111, by the number of ingresses: those on ports 22222 and 44444."""
    found = {}
    for ports in ((), ("22222",), ("22222", "44444")):
        folder = tmp_path_factory.mktemp("haproxy")
        command = [sys.executable, "-W", "ignore", "-c", WRITE, str(folder), "11111", *ports]
        environment = os.environ | {name: value for name, value, _ in HA_PROXY_SWITCHES}
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        found[len(ports)] = (folder / "haproxy.cfg").read_text().replace(str(folder), "FOLDER")
    return found


@dataclass
class Write:
    """Writes Ray's configuration for a port and the ports of ingresses; at `fallback_port` nobody listens."""

    templates: dict[int, str]
    folder: Path
    fallback_port: int = 9

    def __call__(self, port: int, *ingress_ports: int) -> Path:
        text = self.templates[len(ingress_ports)].replace("FOLDER", str(self.folder)).replace("11111", str(port))
        text = text.replace("33333", str(self.fallback_port))
        (self.folder / "state").touch()
        path = self.folder / "haproxy.cfg"
        for placeholder, ingress_port in zip(("22222", "44444"), ingress_ports, strict=False):
            text = text.replace(placeholder, str(ingress_port))
        path.write_text(text)
        return path


@pytest.fixture
def write(templates: dict[int, str], tmp_path: Path) -> Write:
    return Write(templates, tmp_path)


@dataclass
class Door:
    """A HAProxy that listens on `port`."""

    port: int
    process: asyncio.subprocess.Process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def running_pid(folder: Path) -> int | None:
    """The process that answers the control socket, as Ray asks for it."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_unix_connection(folder / "admin.sock")
        writer.write(b"show info\n")
        found = re.search(rb"^Pid: (\d+)", await reader.read(), re.MULTILINE)
        writer.close()
        return int(found[1]) if found else None
    return None


@contextlib.asynccontextmanager
async def haproxy(
    write: Write,
    *ingress_ports: int,
    environment: dict[str, str] | None = None,
    port: int | None = None,
    takes_over: Door | None = None,
    max_files: int | None = None,
) -> AsyncIterator[Door]:
    port = port or free_port()
    path = write(port, *ingress_ports)
    takeover = () if takes_over is None else ("-sf", str(takes_over.process.pid), "-x", str(path.parent / "admin.sock"))
    limited = () if max_files is None else ("sh", "-c", f'ulimit -n {max_files} && exec "$@"', "sh")
    process = await asyncio.create_subprocess_exec(
        *(*limited, sys.executable, "-m", "app.cli.haproxy", "-db", "-f", str(path), "-dR", *takeover),
        env=os.environ | {"RAY_SERVE_HAPROXY_BINARY_PATH": sys.executable} | (environment or {}),
        stderr=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(timeout=120) as http:
            while await running_pid(path.parent) != process.pid:
                assert process.returncode is None, "HAProxy ended"
                await asyncio.sleep(0.05)
            await http.get(f"http://127.0.0.1:{port}/livez")
        yield Door(port, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def ingress(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]],
) -> AsyncIterator[int]:
    """A server that passes health checks and hands every other request's head to `answer`; its port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/-/healthz" in head:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            else:
                await answer(reader, writer, head)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_while_no_ingress_is_up_every_request_is_answered_at_once(write: Write) -> None:
    async with haproxy(write) as door, httpx.AsyncClient(base_url=door.url, timeout=120) as http:
        for path in ("/health", "/v1/models", "/v1/chat/completions"):
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert answer.json()["error"]["code"] == "not_ready"
        assert (await http.get("/livez")).status_code == 200


async def test_health_of_an_ingress_that_is_announced_and_away_is_no_open_connection(write: Write) -> None:
    async with haproxy(write, free_port()) as door, httpx.AsyncClient(base_url=door.url, timeout=120) as http:
        async with asyncio.timeout(120):
            while (await http.get("/health")).status_code != 503:
                await asyncio.sleep(0.1)
        for path in ("/health", "/readyz"):
            answer = await http.get(path)
            assert answer.json()["error"]["code"] == "not_ready"
            assert answer.headers["retry-after"] == "2"
        answer = await http.get("/v1/models")  # the fallback of this test is not there either
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


def test_the_fallback_is_kept_once_an_ingress_was_there(write: Write) -> None:
    text = write(8000, 30_000).read_text()
    assert " backup" in rewritten(text, {}, {})
    alone = re.sub(r"    server s30000 .*\n", "", text)
    assert " backup" in alone
    assert " backup" not in rewritten(alone, {}, {})
    assert " backup" in rewritten(alone, {}, {}, had_ingress=True)


async def test_an_application_that_is_being_stopped_is_a_503_and_no_404(write: Write) -> None:
    """Serve's second proxy, which answers while no ingress does, knows the application no more."""
    kinds = iter([b"text/plain; charset=utf-8", b"application/json"])

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        head = b"HTTP/1.1 404 Not Found\r\ncontent-type: %b\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
        writer.write(head % next(kinds))

    async with ingress(answer) as port:
        write.fallback_port = port
        async with haproxy(write, free_port()) as door, httpx.AsyncClient(base_url=door.url, timeout=120) as http:
            async with asyncio.timeout(120):
                while (await http.get("/health")).status_code != 503:
                    await asyncio.sleep(0.1)
            answer_ = await http.get("/v1/models")
            assert (answer_.status_code, answer_.headers["retry-after"]) == (503, "2")
            assert answer_.json()["error"]["code"] == "not_ready"
            assert (await http.get("/v1/models/nobody")).status_code == 404, "the application's own"


async def test_a_new_manager_s_haproxy_serves_what_the_last_one_did_until_it_is_told(
    write: Write, tmp_path: Path
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

    async with ingress(answer) as port, contextlib.AsyncExitStack() as doors:
        first = await doors.enter_async_context(haproxy(write, port))
        async with httpx.AsyncClient(base_url=first.url, timeout=120) as http:
            assert (await http.get("/v1/models")).status_code == 200
            child = child_of(tmp_path, first)
            first.process.kill()
            await first.process.wait()
            async with asyncio.timeout(60):
                while Path(f"/proc/{child}").exists():
                    await asyncio.sleep(0.02)
            second = await doors.enter_async_context(haproxy(write, port=first.port))  # without an application
            assert (await http.get("/v1/models")).status_code == 200
        await doors.enter_async_context(haproxy(write, port=first.port, takes_over=second))
        async with httpx.AsyncClient(base_url=first.url, timeout=120) as http:
            assert (await http.get("/v1/models")).status_code == 503, "there is no application any more"


def test_that_an_ingress_was_there_is_remembered_beside_the_file(write: Write) -> None:
    def started_with(*ports: int) -> str:
        path = write(8000, *ports)
        if not ports:  # an application without ingresses, as Ray announces it
            path.write_text(re.sub(r"    server s30000 .*\n", "", write(8000, 30_000).read_text()))
        command = [sys.executable, "-m", "app.cli.haproxy", "-c", "-f", str(path)]
        assert subprocess.run(command, check=False).returncode == 0
        (changed,) = path.parent.glob("[0-9]*.cfg")
        text = changed.read_text()
        changed.unlink()
        return text

    assert " backup" not in started_with()
    assert " backup" in started_with(30_000)
    assert " backup" in started_with()


@pytest.mark.parametrize(
    ("trusted", "expected"), [("", "127.0.0.1"), ("10.0.0.0/8", "127.0.0.1"), ("10.1.1.1, 127.0.0.0/8", "1.2.3.4")]
)
async def test_the_client_s_address_is_what_haproxy_sees(write: Write, trusted: str, expected: str) -> None:
    seen: list[str] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        seen.extend(re.findall(r"x-forwarded-for: (.*?)\r\n", head.decode(), re.IGNORECASE))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    environment = {"POLYLORA_TRUSTED_PROXIES": trusted}
    headers = {"X-Forwarded-For": "1.2.3.4"}
    async with (
        ingress(answer) as port,
        haproxy(write, port, environment=environment) as door,
        httpx.AsyncClient(base_url=door.url, timeout=120) as http,
    ):
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
    assert seen == [expected]


@contextlib.asynccontextmanager
async def quick_haproxy(write: Write, ingress_port: int, seconds: int = 1) -> AsyncIterator[int]:
    """A HAProxy of 400 connections whose clients have some seconds for everything; its port."""
    port = free_port()
    path = write(port, ingress_port)
    text = rewritten(path.read_text().replace("maxconn 4096", "maxconn 400"), {}, {})
    text, count = re.subn(r"timeout (http-request|client) \d+s", rf"timeout \1 {seconds}s", text)
    assert count == 2
    path.write_text(text.replace("admin.sock", "own.sock"))
    process = await asyncio.create_subprocess_exec(haproxy_binary(), "-db", "-f", str(path))
    try:
        async with asyncio.timeout(60), httpx.AsyncClient() as http:
            while process.returncode is None:
                with contextlib.suppress(httpx.TransportError):
                    await http.get(f"http://127.0.0.1:{port}/livez")
                    break
                await asyncio.sleep(0.05)
        yield port
    finally:
        process.kill()
        await process.wait()


class Clients:
    """Connections from loopback addresses that send something and then nothing."""

    def __init__(self) -> None:
        self.readers: list[asyncio.StreamReader] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self, address: str, port: int, sent: bytes = b"") -> None:
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            self.readers.append(reader)
            self.writers.append(writer)
            writer.write(sent)

    def held(self) -> list[asyncio.StreamReader]:
        """The connections that are not closed, on which nothing has come."""
        return [reader for reader in self.readers if not reader.at_eof() and reader.exception() is None]

    async def settle(self, most: int) -> list[asyncio.StreamReader]:
        """The connections that are held a moment after they are no more than `most`."""
        async with asyncio.timeout(30):
            while len(self.held()) > most:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        return self.held()

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self.writers), return_exceptions=True)


@pytest_asyncio.fixture
async def clients() -> AsyncIterator[Clients]:
    found = Clients()
    yield found
    await found.close()


async def answer_from(address: str, port: int, path: str) -> int:
    transport = httpx.AsyncHTTPTransport(local_address=address)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        return (await http.get(path)).status_code


async def ok(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")


HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"


@pytest.mark.parametrize("sent", [b"", HALF[:20], HALF])
async def test_silent_clients_keep_nobody_else_out(write: Write, clients: Clients, sent: bytes) -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        heads.append(head)
        await ok(reader, writer, head)

    # While all connections are made, none may end: a busy machine takes seconds for that.
    async with ingress(answer) as port, quick_haproxy(write, port, seconds=10) as door:
        await asyncio.gather(*(clients.open("127.0.0.2", door, sent) for _ in range(150)))
        held = await clients.settle(100)
        assert len(held) == 100, "a quarter of all connections"
        assert await answer_from("127.0.0.3", door, "/v1/models") == 200
        async with asyncio.timeout(60):  # a silent client has ten seconds, and then its address may connect again
            for reader in held:
                rest = await reader.read()
                assert rest == b"", "closed without a word: HAProxy has only HTML for it"
        assert await answer_from("127.0.0.2", door, "/v1/models") == 200
        assert not any(b"POST" in head for head in heads), "no ingress has seen a request that is not complete"


async def test_the_last_connections_are_for_addresses_that_have_few(write: Write, clients: Clients) -> None:
    async with ingress(ok) as port, quick_haproxy(write, port, seconds=30) as door:
        await asyncio.gather(*(clients.open(f"127.0.1.{n}", door) for n in range(1, 5) for _ in range(100)))
        assert 340 <= len(await clients.settle(360)) <= 360
        for path in ("/livez", "/health", "/v1/models"):
            assert await answer_from("127.0.0.9", door, path) == 200


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may open some thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_with_few_open_files_it_holds_fewer_connections_and_serves(write: Write, clients: Clients) -> None:
    async with ingress(ok) as port, haproxy(write, port, max_files=1024) as door:
        reader, writer = await asyncio.open_unix_connection(write.folder / "admin.sock")
        writer.write(b"show info\n")
        maxima = dict(re.findall(r"^(Maxconn|Ulimit-n): (\d+)", (await reader.read()).decode(), re.MULTILINE))
        writer.close()
        assert int(maxima["Maxconn"]) == connections_for_files(1024)
        assert int(maxima["Ulimit-n"]) <= 1024
        # Idle connections, as many as would fill all places several times.
        await asyncio.gather(*(clients.open(f"127.0.1.{1 + n % 8}", door.port) for n in range(2000)))
        for path in ("/livez", "/health", "/v1/models"):
            assert await answer_from("127.0.0.9", door.port, path) == 200


async def test_an_answer_may_take_longer_than_a_client(write: Write) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        await asyncio.sleep(2.5)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        for _ in range(2):
            writer.write(b"1\r\nx\r\n")
            await writer.drain()
            await asyncio.sleep(2)
        writer.write(b"0\r\n\r\n")

    async with ingress(answer) as port, quick_haproxy(write, port) as door, httpx.AsyncClient(timeout=60) as http:
        sent = await http.post(f"http://127.0.0.1:{door}/v1/completions", json={})
        assert (sent.status_code, sent.text) == (200, "xx")


async def test_a_long_body_that_stops_arriving_is_cut(write: Write, clients: Clients) -> None:
    cut = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, _: asyncio.StreamWriter, __: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        cut.set()

    async with ingress(answer) as port, quick_haproxy(write, port) as door:
        head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
        await clients.open("127.0.0.2", door, head + bytes(100_000))
        (reader,) = clients.readers
        async with asyncio.timeout(30):
            await cut.wait()
            assert await reader.read() == b"", "closed: HAProxy could answer only in HTML"


async def test_a_method_without_a_body_has_none_or_a_short_one(write: Write) -> None:
    async def long() -> AsyncIterator[bytes]:
        yield b"{}"

    async with ingress(ok) as port, quick_haproxy(write, port, 5) as door, httpx.AsyncClient(timeout=60) as http:
        url = f"http://127.0.0.1:{door}/v1/loras/x"
        for method in ("GET", "DELETE"):
            refused = await http.request(method, url, content=long())
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
            assert (await http.request(method, url, content=bytes(100_000))).status_code == 413
            assert (await http.request(method, url, content=b"{}")).status_code == 200
        assert (await http.post(url, content=long())).status_code == 200


async def test_proxies_that_are_trusted_may_hold_all_connections(write: Write) -> None:
    text = rewritten(write(8000, 30_000).read_text(), {}, {"POLYLORA_TRUSTED_PROXIES": "10.0.0.0/8"})
    assert "tcp-request connection track-sc0 src,ipmask(32,64) unless { src 10.0.0.0/8 }" in text


@pytest.mark.parametrize(
    ("version", "header", "is_passed_on"),
    [
        (b"1.1", b"", False),
        (b"1.0", b"", True),
        (b"1.1", b"X-Forwarded-For: 127.0.0.1\r\n", True),
        (b"1.1", b"Forwarded: for=10.0.0.9\r\n", True),
        (b"1.1", b"X-Forwarded-Host: h\r\n", True),
        (b"1.1", b"X-Forwarded-Proto: https\r\n", True),
        (b"1.1", b"X-Real-IP: 10.0.0.9\r\n", True),
        (b"1.1", b"Via: 1.1 another\r\n", True),
    ],
)
async def test_the_ingress_hears_of_another_proxy(
    write: Write, version: bytes, header: bytes, is_passed_on: bool
) -> None:
    seen: list[bytes] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        seen.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    async with ingress(answer) as port, haproxy(write, port) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(b"GET /v1/models HTTP/%b\r\nhost: 127.0.0.1\r\n%bconnection: close\r\n\r\n" % (version, header))
        assert b" 200 " in await reader.readline()
        writer.close()
    (head,) = seen
    assert len(re.findall(rb"^via: ", head, re.MULTILINE | re.IGNORECASE)) == int(is_passed_on)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_it_listens_where_the_service_does_and_ray_stays_on_loopback(write: Write, host: str) -> None:
    text = write(8000, 30_000).read_text()
    changed = rewritten(text, {}, {"POLYLORA_HTTP_HOST": host})
    assert re.findall(r"^\s*bind (.*)$", changed, re.MULTILINE) == [f"{host}:8000"]
    assert re.findall(r"server s30000 (\S+)", changed) == ["127.0.0.1:30000"]


async def test_a_client_with_ipv6_is_answered_and_known_by_its_address(write: Write) -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        heads.append(head)
        await ok(reader, writer, head)

    async with (
        ingress(answer) as port,
        haproxy(write, port, environment={"POLYLORA_HTTP_HOST": "::"}) as door,
        httpx.AsyncClient(timeout=60) as http,
    ):
        assert (await http.get(f"http://[::1]:{door.port}/v1/models")).status_code == 200
    assert re.findall(rb"(?i)x-forwarded-for: (.*?)\r\n", heads[0]) == [b"::1"]


@pytest.mark.parametrize("prefix", ["sk-poly-", "sk%2Dpoly%2D", "%73k-admin-poly-"])
async def test_the_log_has_no_key_of_a_path(templates: dict[int, str], tmp_path: Path, prefix: str) -> None:
    secret = "abcDEF123_-abcDEF123_-abcDEF123_-abcDEF1234"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as log:
        log.bind(("127.0.0.1", 0))
        log.settimeout(60)
        address = f"127.0.0.1:{log.getsockname()[1]}"
        write = Write({number: text.replace("127.0.0.1:514", address) for number, text in templates.items()}, tmp_path)
        async with haproxy(write) as door:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(f"GET /v1/models/{prefix}{secret} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            await reader.read()
            writer.close()
            while b"/v1/models/" not in (line := await asyncio.to_thread(log.recv, 1 << 16)):
                pass
    assert b'"/v1/models/sk-..."' in line
    assert secret[:8].encode() not in line


async def test_the_ingress_hears_that_a_client_left_whose_body_came_after_its_head(write: Write) -> None:
    """As httpx, and so every Python client, sends it. Who does not hear it computes the answer to its end."""
    num_heard, whole = 0, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, _: asyncio.StreamWriter, head: bytes) -> None:
        nonlocal num_heard
        await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head, re.IGNORECASE)[0]))
        whole.set()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b"", "the end of the connection, and no more bytes"
        num_heard += 1

    async with ingress(answer) as port, haproxy(write, port) as door:
        body = json.dumps({"prompt": "x" * 500}).encode()
        for gap_s in (0, 0.001, 0.01):
            whole.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
            await writer.drain()
            await asyncio.sleep(gap_s)
            writer.write(body)
            await writer.drain()
            async with asyncio.timeout(60):
                await whole.wait()
            await asyncio.sleep(0.3)
            writer.close()
        async with asyncio.timeout(30):  # HAProxy may wait for an answer instead, and then nothing is heard
            while num_heard < 3:
                await asyncio.sleep(0.05)


def test_statistics_listen_nowhere_unless_asked_for_and_then_on_loopback(write: Write) -> None:
    text = write(8000, 30_000).read_text()
    assert "bind *:8404" in text, "what Ray opens to everybody"
    assert "bind :9101" in text
    changed = rewritten(text, {}, {})
    assert re.findall(r"^\s*bind (.*)$", changed, re.MULTILINE) == ["127.0.0.1:8000"]
    asked = rewritten(text, {}, {"RAY_SERVE_HAPROXY_METRICS_PORT": "9101", "RAY_SERVE_HAPROXY_STATS_PORT": "8404"})
    binds = re.findall(r"^\s*bind (.*)$", asked, re.MULTILINE)
    assert sorted(binds) == ["127.0.0.1:8000", "127.0.0.1:8404", "127.0.0.1:9101"]
    assert "mode 666" in text
    assert "mode 666" not in changed


@pytest.mark.parametrize(
    ("method", "path", "is_repeated"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/prefix/v1/embeddings", True),
        ("GET", "/v1/models", True),
        ("POST", "/v1/loras", False),
        ("POST", "/v1/organization/projects", False),
        ("DELETE", "/v1/loras/sql", False),
        ("DELETE", "/v1/loras/org/generate", False),
    ],
)
async def test_a_request_that_an_ingress_lost_goes_to_another_one_unless_it_would_be_done_twice(
    write: Write, method: str, path: str, is_repeated: bool
) -> None:
    bodies: list[bytes] = []

    async def answer_once_two_came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        """The first request of any ingress is lost with its connection, as when the process is killed."""
        found = re.search(rb"(?i)content-length: (\d+)", head)
        bodies.append(await reader.readexactly(int(found[1])) if found else b"")
        if len(bodies) > 1:
            await ok(reader, writer, head)

    body = None if method != "POST" else b"x" * 20_000
    async with (
        ingress(answer_once_two_came) as first,
        ingress(answer_once_two_came) as second,
        haproxy(write, first, second) as door,
        httpx.AsyncClient(base_url=door.url, timeout=60) as http,
    ):
        answer = await http.request(method, path, content=body)
    assert (answer.status_code, len(bodies)) == ((200, 2) if is_repeated else (502, 1)), answer.text
    assert set(bodies) == {body or b""}
    if not is_repeated:
        assert answer.json()["error"]["code"] == "ingress_lost"


def test_nothing_else_changes(write: Write, tmp_path: Path) -> None:
    text = write(8000, 30_000).read_text()
    before, after = text.splitlines(), rewritten(text, {503: tmp_path / "503.http"}, {}).splitlines()
    gone = {line.strip() for line in before} - {line.strip() for line in after}
    added = {line.strip() for line in after} - {line.strip() for line in before}
    left_out = r"option (splice|httplog)|errorfile|bind |stats|http-request use-serv|frontend prom|listen stats|no log|"
    left_out += "timeout client 3600s|http-request return status 404 content-type text/plain"
    put_in = r"errorfile 503|log-format |http-re\w+ (set-header X-For|return|del-header X-Req|set-var\(txn.path)|"
    put_in += (
        "acl an_ingress|acl is_passed_on|http-request set-header Via|stats socket|timeout (client|http-request) |"
        "stick-table|tcp-request connection|option http-[bi]|errorfile \\d+ /dev/null|"
        "(option )?srvtcpka|default-server tcp-ut|"
        "acl is_reading|acl is_inference|http-request disable-l7-retry"
    )
    assert all(re.match(left_out, line) for line in gone), gone
    assert all(re.match(put_in, line) for line in added), added


def child_of(folder: Path, door: Door) -> int:
    """The HAProxy that a supervisor runs."""
    return int((folder / f"{door.process.pid}.pid").read_text())


async def test_a_haproxy_that_is_killed_is_back_at_once(write: Write, tmp_path: Path) -> None:
    async with haproxy(write) as door, httpx.AsyncClient(base_url=door.url, timeout=120) as http:
        for _ in range(2):
            first = child_of(tmp_path, door)
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        assert (await http.get("/livez")).status_code == 200
                        break
                    await asyncio.sleep(0.02)
            assert child_of(tmp_path, door) != first
            assert await running_pid(tmp_path) == door.process.pid, "Ray sees nothing of it"
        assert len((tmp_path / "failures").read_text().splitlines()) == 2


@contextlib.asynccontextmanager
async def slow_ingress() -> AsyncIterator[tuple[int, asyncio.Event, asyncio.Event]]:
    """Its port; set when the models are asked for; to be set to answer them."""
    begun, answers = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        if b"/v1/models" in head:
            begun.set()
            await answers.wait()
        await ok(reader, writer, head)

    async with ingress(answer) as port:
        yield port, begun, answers


async def is_refused(door: Door) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", door.port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def answer_after_death(folder: Path, door: Door) -> bytes:
    """The answer to a client that comes while HAProxy is dead and its supervisor has not noticed."""
    os.kill(door.process.pid, signal.SIGSTOP)
    pid = child_of(folder, door)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        with contextlib.suppress(FileNotFoundError):
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        os.kill(door.process.pid, signal.SIGCONT)
        answer = await reader.read()
    writer.close()
    return answer


async def ended_by_ray(replaced: Door) -> int:
    """The status of one that another has replaced, which Ray then tells to end, although it may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        # `send_signal` would first take the status of one that has just ended, and asyncio would then report 255.
        os.kill(replaced.process.pid, signal.SIGUSR1)
    return await asyncio.wait_for(replaced.process.wait(), 60)


async def test_who_comes_while_haproxy_is_dead_waits_for_the_next(write: Write, tmp_path: Path) -> None:
    port = free_port()
    async with haproxy(write, port=port) as old:
        assert (await answer_after_death(tmp_path, old)).startswith(b"HTTP/1.1 200 ")
        async with haproxy(write, port=port, takes_over=old) as new:
            assert await ended_by_ray(old) == 0
            assert (await answer_after_death(tmp_path, new)).startswith(b"HTTP/1.1 200 "), "the socket was handed on"


@contextlib.asynccontextmanager
async def draining(
    write: Write, port: int
) -> AsyncIterator[tuple[Door, int, asyncio.Event, asyncio.Task[httpx.Response]]]:
    """One that was stopped while it has a request: the door, its ingress's port, to be set to answer, the answer."""
    async with (
        slow_ingress() as (ingress_port, begun, answers),
        haproxy(write, ingress_port, port=port) as door,
        httpx.AsyncClient(base_url=door.url, timeout=120) as http,
    ):
        while (await http.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.05)
        answer = asyncio.create_task(http.get("/v1/models"))
        await begun.wait()
        os.kill(door.process.pid, signal.SIGUSR1)
        async with asyncio.timeout(60):
            while not await is_refused(door):
                await asyncio.sleep(0.02)
        yield door, ingress_port, answers, answer


async def test_one_that_is_stopped_refuses_new_clients_while_it_finishes_the_others(write: Write) -> None:
    async with draining(write, free_port()) as (door, _, answers, answer):
        answers.set()
        assert (await answer).status_code == 200
        assert await asyncio.wait_for(door.process.wait(), 60) == 0


async def test_a_haproxy_is_named_whole_before_it_runs(tmp_path: Path) -> None:
    pid_file = tmp_path / f"{os.getpid()}.pid"
    look = f"echo $$ $(cat {pid_file}) $(ls {tmp_path}/*.pid) >> {tmp_path}/seen"
    supervisor = Supervisor("/bin/sh", ["-c", look], tmp_path / "config", tmp_path / "admin.sock", "haproxy.cfg")
    pids = []
    for _ in range(2):
        before = pid_file.open() if pids else None  # as of who reads it while the next one is started
        await supervisor._start(supervisor._first)
        assert supervisor._child is not None
        assert await supervisor._child.wait() == 0
        await supervisor._reading
        if before is not None:
            with before:
                assert int(before.read()) == pids[-1], "it is replaced, and never empty"
        pids.append(supervisor._child.pid)
    assert (tmp_path / "seen").read_text().splitlines() == [f"{pid} {pid} {pid_file}" for pid in pids]
    assert supervisor._child_of(os.getpid()) == pids[-1]
    pid_file.unlink()
    assert supervisor._child_of(os.getpid()) is None


async def test_a_supervisor_that_is_stopped_while_it_starts_haproxy_again_ends(write: Write, tmp_path: Path) -> None:
    async with haproxy(write) as door:
        os.kill(child_of(tmp_path, door), signal.SIGKILL)
        async with asyncio.timeout(60):
            while not (tmp_path / "failures").exists():
                await asyncio.sleep(0.005)
            door.process.send_signal(signal.SIGTERM)
            assert await door.process.wait() == 0
        assert not list(tmp_path.glob("*.pid"))


async def test_one_that_ends_as_it_is_told_to_has_its_own_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes its place ends HAProxy itself, and then its supervisor, which passes the signal on."""
    told, waitpid = threading.Event(), os.waitpid

    def late(pid: int, options: int) -> tuple[int, int]:  # asyncio's
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        told.wait(60)
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", late)
    supervisor = Supervisor("sleep", ["60s"], tmp_path / "config", tmp_path / "admin.sock", "haproxy.cfg")
    await supervisor._start(supervisor._first)
    assert supervisor._child is not None
    os.kill(supervisor._child.pid, signal.SIGUSR1)
    os.waitid(os.P_PID, supervisor._child.pid, os.WEXITED | os.WNOWAIT)
    supervisor._stop(signal.SIGUSR1)
    told.set()
    assert await supervisor._child.wait() == -signal.SIGUSR1
    await supervisor._reading


async def test_a_new_one_takes_an_old_ones_place_without_a_refused_connection(write: Write, tmp_path: Path) -> None:
    port = free_port()
    stop = asyncio.Event()

    asked = 0

    async def ask(url: str) -> None:
        nonlocal asked
        while not stop.is_set():
            async with httpx.AsyncClient(timeout=120) as http:
                assert (await http.get(f"{url}/livez")).status_code == 200
            asked += 1

    async with haproxy(write, port=port) as old:
        asking = asyncio.create_task(ask(old.url))
        async with haproxy(write, port=port, takes_over=old) as new:
            assert await ended_by_ray(old) == 0
            while asked < 5 and not asking.done():
                await asyncio.sleep(0.01)
            stop.set()
            await asking
            os.kill(child_of(tmp_path, new), signal.SIGKILL)  # the place that was taken is taken again
            async with asyncio.timeout(60):
                while await running_pid(tmp_path) != new.process.pid:
                    await asyncio.sleep(0.02)


async def test_one_that_was_left_behind_gives_its_place_to_the_next(write: Write) -> None:
    port = free_port()
    async with haproxy(write, port=port) as orphan, haproxy(write, port=port) as new:
        assert await asyncio.wait_for(orphan.process.wait(), 60) == 0
        async with httpx.AsyncClient(base_url=new.url, timeout=120) as http:
            assert (await http.get("/livez")).status_code == 200


async def test_one_that_was_left_behind_while_it_drains_keeps_no_other_from_starting(write: Write) -> None:
    port = free_port()
    async with (
        draining(write, port) as (_, ingress_port, answers, answer),
        haproxy(write, ingress_port, port=port) as new,
        httpx.AsyncClient(base_url=new.url, timeout=120) as http,
    ):
        assert (await http.get("/livez")).status_code == 200
        answers.set()
        assert (await answer).status_code == 200


async def test_with_polylora_serve_haproxy_outlives_its_supervisor_until_it_is_replaced_or_serve_ends(
    write: Write, tmp_path: Path
) -> None:
    port = free_port()
    serve = await asyncio.create_subprocess_exec("sleep", "600")
    environment = {SERVE_PID: str(serve.pid)}
    async with (
        slow_ingress() as (ingress_port, begun, answers),
        haproxy(write, ingress_port, port=port, environment=environment) as old,
        httpx.AsyncClient(base_url=old.url, timeout=120) as http,
    ):
        while (await http.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.05)
        first = child_of(tmp_path, old)
        answer = asyncio.create_task(http.get("/v1/models"))
        await begun.wait()
        old.process.kill()
        await old.process.wait()
        assert await running_pid(tmp_path) is None, "Ray sees that it has died"
        for _ in range(20):
            async with httpx.AsyncClient(base_url=old.url, timeout=120) as other:
                assert (await other.get("/readyz")).status_code == 200
        async with haproxy(write, ingress_port, port=port, environment=environment) as new:
            second = child_of(tmp_path, new)
            answers.set()
            assert (await answer).status_code == 200, "what ran goes on"
            assert (await http.get("/readyz")).status_code == 200
            await until_gone(first)
            async with asyncio.timeout(60):
                while [path.stem for path in tmp_path.glob("*.pid")] != [str(new.process.pid)]:
                    await asyncio.sleep(0.02)
            os.kill(second, signal.SIGKILL)
            while (third := child_of(tmp_path, new)) == second or command_name(third) != "haproxy":
                await asyncio.sleep(0.02)  # it is named before it runs
            new.process.kill()
            await new.process.wait()
            assert command_name(third) == "haproxy"
            serve.kill()
            await serve.wait()
            await until_gone(third)
    async with asyncio.timeout(60):
        while list(tmp_path.glob("*.pid")):
            await asyncio.sleep(0.02)


async def test_without_descriptors_of_processes_haproxy_runs_and_dies_with_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, pidfd_open = os.getpid(), os.pidfd_open

    def refuse(pid: int) -> int:  # in its children, as Linux before 5.3 does: asyncio may need it here
        if os.getpid() == own:
            return pidfd_open(pid)
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setenv(SERVE_PID, str(own))
    command = ["-c", "sleep 0.5; exit 7"]
    supervisor = Supervisor("sh", command, tmp_path / "config", tmp_path / "admin.sock", "haproxy.cfg")
    await supervisor._start(supervisor._first)
    assert supervisor._child is not None
    assert await supervisor._child.wait() == 7
    await supervisor._reading


async def test_the_end_of_polylora_serve_frees_the_port(write: Write, tmp_path: Path) -> None:
    async with haproxy(write, environment={SERVE_PID: str(os.getpid())}) as door:
        door.process.kill()
        await door.process.wait()
        with socket.create_connection(("127.0.0.1", door.port)):
            pass
        await asyncio.to_thread(end_haproxys, tmp_path)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", door.port))


async def test_the_end_of_polylora_serve_does_not_wait_for_a_process_that_the_kernel_does_not_end(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with haproxy(write) as door:
        kill = os.kill
        monkeypatch.setattr(os, "kill", lambda *_: None)
        monkeypatch.setattr(haproxy_supervisor, "END_TIMEOUT_S", 0.1)
        async with asyncio.timeout(60):
            await asyncio.to_thread(end_haproxys, tmp_path)
        monkeypatch.setattr(os, "kill", kill)
        assert command_name(child_of(tmp_path, door)) == "haproxy"


def command_name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(60):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


async def test_a_supervisor_that_is_killed_takes_haproxy_with_it(write: Write, tmp_path: Path) -> None:
    async with haproxy(write) as door:
        child = child_of(tmp_path, door)
        door.process.kill()
        await until_gone(child)


def test_one_that_cannot_run_says_why_and_leaves_it_to_ray(write: Write, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path = write(taken.getsockname()[1])
        command = [sys.executable, "-m", "app.cli.haproxy", "-db", "-f", str(path), "-dR"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot bind socket" in done.stderr.lower()
    (reason,) = (tmp_path / "failures").read_text().splitlines()
    assert "cannot bind socket (Address already in use)" in reason


def test_two_services_that_start_at_once_do_not_share_a_port(tmp_path: Path) -> None:
    port = free_port()
    with bound_socket(tmp_path / "first" / "admin.sock", "127.0.0.1", port) as first:
        first.listen()
        with pytest.raises(OSError, match="Address already in use"):
            bound_socket(tmp_path / "second" / "admin.sock", "127.0.0.1", port)


def test_a_haproxy_that_was_replaced_has_time_for_the_longest_answer(write: Write) -> None:
    found = re.search(r"^\s*hard-stop-after (\d+)s$", rewritten(write(8000, 30_000).read_text(), {}, {}), re.MULTILINE)
    assert found is not None
    assert int(found[1]) >= LimitsConfig().request_timeout_s + INGRESS_DRAIN_MARGIN_S


@pytest.mark.parametrize(
    "anchor", ["frontend http_frontend", "defaults", "backend default_backend", "option splice-", "option httplog"]
)
def test_a_configuration_that_is_not_rays_is_refused_in_words(write: Write, anchor: str) -> None:
    text = write(8000).read_text()
    assert anchor in text
    with pytest.raises(UnknownConfiguration, match="Ray's HAProxy configuration"):
        rewritten(text.replace(anchor, f"{anchor[:-1]}_"), {}, {})


def test_a_trusted_proxy_that_is_no_address_is_refused(write: Write) -> None:
    path = write(8000)
    command = [sys.executable, "-m", "app.cli.haproxy", "-c", "-f", str(path)]
    environment = os.environ | {"POLYLORA_TRUSTED_PROXIES": "balancer"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'balancer' does not appear to be an IPv4 or IPv6 network" in done.stderr


@pytest.mark.parametrize(
    "status", [400, 401, 403, 404, 405, 407, 408, 410, 413, 421, 422, 425, 429, 500, 501, 502, 503, 504]
)
def test_answers_of_its_own_are_whole(status: int) -> None:
    head, _, body = error_answer(status).partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert f"content-length: {len(body)}" in head
    assert ("retry-after: " in head) == (status in (408, 425, 429, 500, 502, 503, 504))
    error = json.loads(body)["error"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"}


async def test_a_configuration_of_16_kib_comes_in_a_header_and_a_longer_one_gets_json(write: Write) -> None:
    async with ingress(ok) as port, haproxy(write, port) as door, httpx.AsyncClient(timeout=60) as http:
        url = f"{door.url}/v1/loras/org%2Fx/weights"
        for num_bytes in (16 << 10, MAX_HEAD_BYTES - 1024):
            answer = await http.put(url, content=b"weights", headers={"X-Adapter-Config": "x" * num_bytes})
            assert answer.status_code == 200, num_bytes
        answer = await http.put(url, content=b"weights", headers={"X-Adapter-Config": "x" * (48 << 10)})
        assert (answer.status_code, answer.headers["content-type"]) == (431, "application/json")
        assert "multipart" in answer.json()["error"]["message"]
        with pytest.raises(httpx.RemoteProtocolError):  # beyond HAProxy's buffer there is no answer
            await http.put(url, content=b"weights", headers={"X-Adapter-Config": "x" * (80 << 10)})


@pytest.mark.parametrize(
    "head",
    [b"GET", b"GET /\x00 HTTP/1.1", b"GET / HTTP/9.9", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b c",
     b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", b"POST / HTTP/1.1\r\nTransfer-Encoding: x, chunked",
     b"CONNECT a:1 HTTP/1.1", b"\xff\xff", b"GET / HTTP/1.1\r\nno colon"],
)  # fmt: skip
async def test_no_request_gets_html(write: Write, head: bytes) -> None:
    async with ingress(ok) as port, haproxy(write, port) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(head + b"\r\n\r\n")
        async with asyncio.timeout(60):
            answer = await reader.read(4096)
        writer.close()
        start, _, body = answer.partition(b"\r\n\r\n")
        if start and b" 200 " not in start:  # HAProxy passes some of them on, and closes others without a word
            assert b"application/json" in start
            assert json.loads(body)["error"]["message"]


async def test_the_ingress_gets_a_path_as_the_client_wrote_it(write: Write) -> None:
    heads: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        heads.append(head)
        await ok(reader, writer, head)

    async with ingress(note) as port, haproxy(write, port) as door, httpx.AsyncClient(timeout=60) as http:
        for path in ("/v1/models/org%2Fname%40sha256:3f9c2a71", "/v1/models/org/name@2"):
            assert (await http.get(f"{door.url}{path}")).status_code == 200
            assert heads.pop().split()[1].decode() == path


def test_files_of_two_users_lie_apart_and_sockets_have_short_paths() -> None:
    places = ha_proxy_places()
    node_id = "f" * 56
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        path = Path(places[name])
        assert str(os.getuid()) in str(path)
        assert len(str(path.parent / node_id / path.name)) + len(".4194304.tmp") <= 107
