"""What the command calls wrong, and what it excuses."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from load_tests.chaos import events as events_module
from load_tests.chaos import recovery as recovery_module
from load_tests.chaos import registrations as registrations_module
from load_tests.chaos.__main__ import settings, small_disk, staged_files
from load_tests.chaos.events import Events, Faults
from load_tests.chaos.hub import Hub
from load_tests.chaos.recovery import Recoveries
from load_tests.chaos.registrations import Registrations
from load_tests.chaos.traffic import BALANCER_SAYS, PROXY_OUTAGE_S, Cut, ProxyOutages, Traffic, ask
from load_tests.chaos.usage import Usage, leaks, usage
from tests.postgres import PostgresServer, find_postgres

Handler = Callable[[httpx.Request], httpx.Response]
BODY = {"model": "tiny", "prompt": "x", "seed": 3}


def stream_of(*texts: str, ends: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps({'choices': [{'text': text}]})}" for text in texts] + ["data: [DONE]"] * ends
    return httpx.Response(200, text="\n\n".join(lines) + "\n\n")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    """Have every client talk to a handler."""
    real = httpx.AsyncClient

    def set_handler(handler: Handler) -> None:
        monkeypatch.setattr(
            httpx, "AsyncClient", lambda **options: real(transport=httpx.MockTransport(handler), **options)
        )

    return set_handler


async def asked(handler: Handler) -> str:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://test") as http:
        return await ask(http, BODY)


async def test_an_answer_is_whole_or_cut_or_refused() -> None:
    assert await asked(lambda _: stream_of("a", "b")) == "ab"
    with pytest.raises(Cut, match="without") as cut:
        await asked(lambda _: stream_of("a", ends=False))
    assert cut.value.text == "a"
    with pytest.raises(Cut, match="balancer says 503"):
        await asked(lambda _: httpx.Response(503, text="<html>"))
    with pytest.raises(Cut, match="balancer says 503"):
        await asked(lambda _: httpx.Response(503, json={"error": {"message": f"{BALANCER_SAYS}; ask again"}}))
    with pytest.raises(RuntimeError, match="not ready"):
        await asked(lambda _: httpx.Response(503, json={"error": "not ready"}))

    def breaks(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset")

    with pytest.raises(Cut, match="ReadError"):
        await asked(breaks)


async def test_only_the_death_of_an_ingress_or_proxy_excuses_a_closed_connection(
    serve: Callable[[Handler], None],
) -> None:
    now_s = 0.0
    answers: list[httpx.Response | httpx.TransportError] = [stream_of("a", "b")]

    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(given := answers.pop(0), httpx.TransportError):
            raise given
        return given

    serve(answer)
    outages = ProxyOutages(lambda: now_s)
    traffic = Traffic("http://test", [BODY], outages, seed=0)
    await traffic.learn()

    async def one(answer: httpx.Response | httpx.TransportError) -> list[str]:
        answers.append(answer)
        num_before = len(traffic.wrongs)
        await traffic.compare()
        return [wrong.split(": ")[1] for wrong in traffic.wrongs[num_before:]]

    assert await one(stream_of("ab")) == []
    assert await one(stream_of("ac")) == ["wrong tokens"]
    assert await one(stream_of("a", ends=False)) == ["cut off"]
    assert await one(httpx.Response(503, json={"error": "busy"})) == ["refused"]
    outages.record_kill("ingress")
    now_s += 2
    assert await one(stream_of("a", ends=False)) == []
    assert (outages.longest_s, outages.num_refused) == ({"ingress": 2}, {"ingress": 0})
    assert await one(stream_of("c", ends=False)) == ["wrong tokens"], "what came is not the beginning of the answer"
    assert await one(httpx.Response(503, json={"error": "busy"})) == ["refused"]
    outages.record_kill("haproxy")
    assert await one(httpx.ConnectError("refused")) == []
    assert (outages.longest_s, outages.num_refused) == ({"ingress": 2, "haproxy": 0}, {"ingress": 0, "haproxy": 1})
    now_s += PROXY_OUTAGE_S + 1
    assert await one(stream_of("a", ends=False)) == ["cut off"]
    assert traffic.ended["answered"] == 1


class Registry:
    """A service that forgets what it is told to forget."""

    def __init__(self) -> None:
        self.means: dict[str, str] = {}
        self.forgets = False
        self.num_changes = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and request.url.path == "/v1/loras":
            self.num_changes += 1
            body = json.loads(request.content)
            if not self.forgets:
                self.means[body["name"]] = body["path"]
            return httpx.Response(201, json={})
        name = request.url.path.rpartition("/")[2]
        if request.method == "DELETE":
            self.num_changes += 1
            self.means.pop(name, None)
            return httpx.Response(200, json={})
        if request.method == "GET":
            return httpx.Response(200, json={"state": "LOADED"}) if name in self.means else httpx.Response(404)
        return stream_of(f"as {self.means[json.loads(request.content)['model']]}")


@pytest.mark.parametrize("fault", ["", "loses a change", "serves another source"])
async def test_what_was_acknowledged_must_be_there(
    serve: Callable[[Handler], None], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations_module, "PAUSE_S", 0.0)
    registry = Registry()
    serve(registry)
    registrations = Registrations("http://test", ["a", "b"], seed=1)
    running = asyncio.create_task(registrations.run())
    while registry.num_changes < 100 and not running.done():
        await asyncio.sleep(0)
    registry.forgets = fault == "loses a change"
    while registry.num_changes < 200 and not running.done():
        await asyncio.sleep(0)
    registrations.stop()
    await running
    if fault == "serves another source":
        registry.means = dict.fromkeys(registry.means, "a")
    await registrations.check({"prompt": "x"}, {"a": "as a", "b": "as b"})
    assert registrations.wrongs == []
    assert bool(registrations.lost) == bool(fault), registrations.lost


def test_a_service_whose_processes_pile_up_has_grown() -> None:
    before = Usage(20, 1000, 3000, Counter({"ingress socket": 40, "store pipe": 960}))
    assert leaks(before, Usage(21, 1100, 3300, Counter())) == []
    assert leaks(before, Usage(40, 1200, 9000, Counter({"ingress socket": 240, "store pipe": 960}))) == [
        "num_processes grew from 20 to 40",
        "num_files grew from 1000 to 1200: 200 more of ingress socket",
        "resident_mb grew from 3000 to 9000",
    ]


def test_what_a_process_holds_is_counted_by_kind() -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["cat"], start_new_session=True, bufsize=0, **pipes) as echo:
        assert echo.stdin is not None
        assert echo.stdout is not None
        echo.stdin.write(b"x")
        assert echo.stdout.read(1) == b"x", "it has begun"
        held = usage(echo.pid)
        echo.kill()
    assert (held.num_processes, held.num_files) == (1, held.kinds.total())
    assert held.kinds["polylora serve pipe"] >= 2


def test_what_downloads_leave_behind_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "disk" / "staging" / "123-abc"
    folder.mkdir(parents=True)
    for name in ("guard", "123-abc.lock"):
        (folder.parent / name).touch()
    assert staged_files(tmp_path) == []
    (folder / "adapter_model.safetensors").touch()
    (wrong,) = staged_files(tmp_path)
    assert wrong.startswith("1 files of downloads are left")


async def test_a_hub_that_hangs_answers_afterwards(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    with Hub(tmp_path) as hub:
        async with httpx.AsyncClient(base_url=hub.url, timeout=60) as http:
            assert (await http.get("a/adapter_config.json")).text == "{}"
            assert (await http.head("a/none")).status_code == 404
            hub.answers.clear()
            asked = [asyncio.create_task(http.request(method, "a/adapter_config.json")) for method in ("GET", "HEAD")]
            done, _ = await asyncio.wait(asked, timeout=0.05)
            assert not done
            hub.answers.set()
            assert [(await answer).status_code for answer in asked] == [200, 200]


async def test_each_deed_is_done_once_before_any_is_done_again() -> None:
    now_s, done = [0.0], []

    def fault(name: str) -> Callable[[], Awaitable[str]]:
        async def do() -> str:
            now_s[0] += 1
            done.append(name)
            if name == "b":
                raise ProcessLookupError
            return "it"

        return do

    events = Events({name: fault(name) for name in "abc"}, 0.0, random.Random(1), lambda: now_s[0])
    await events.run(6.0)
    assert sorted(done[:3]) == sorted(done[3:]) == ["a", "b", "c"]
    assert len(events.happened) == 4, "what was no longer there to be killed did not happen"
    assert events.num_by_kind == {"a": 2, "c": 2}


@pytest.mark.parametrize("has_database", [True, False])
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_a_database_or_node_that_is_not_there_is_left_alone(has_database: bool, num_nodes: int) -> None:
    database: Any = object() if has_database else None
    nodes: list[Any] = [object()] * (num_nodes - 1)
    nothing: Any = None
    faults = Faults(list, nodes, database, nothing, Path(), ProxyOutages(), nothing, random.Random(0)).faults
    assert len(faults) == 12 + 2 * has_database + 2 * (num_nodes > 1)
    assert sum("database" in name for name in faults) == (2 if has_database else 0)
    assert sum("raylet" in name for name in faults) == (2 if num_nodes > 1 else 0)


def test_each_node_has_an_engine_and_an_ingress_and_a_single_one_two(tmp_path: Path) -> None:
    def replicas(num_nodes: int) -> list[tuple[int, int | None]]:
        deployments = settings(tmp_path, "http://hub/", num_nodes)["applications"][0]["deployments"]
        return [(each["num_replicas"], each.get("max_replicas_per_node")) for each in deployments]

    assert replicas(1) == [(2, None)] * 2
    assert replicas(3) == [(3, 1)] * 2


async def test_a_part_works_again_when_all_of_it_takes_requests(
    serve: Callable[[Handler], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recovery_module, "POLL_S", 0.001)
    found = {"engine": [1], "placement": [2], "ingress": [3, 4]}
    monkeypatch.setattr(recovery_module, "processes", lambda *_: found)
    statuses = ["UP", "DOWN"]

    async def haproxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"show stat\n"
        rows = [*((status, 1, 2) for status in statuses), ("UP", 0, 2), ("UP", 1, 1)]  # a backup, and the whole backend
        writer.write("".join(["# status,act,type\n", *(f"{a},{b},{c}\n" for a, b, c in rows)]).encode())
        writer.close()

    replicas = [{"state": "running"}, {"state": "unreachable"}]
    overview = {"replicas": replicas, "scaling_decisions": None}
    serve(lambda request: httpx.Response(200, json=overview if "overview" in request.url.path else {"state": "LOADED"}))
    now_s = 100.0
    socket = tmp_path / "node" / "admin.sock"
    socket.parent.mkdir()
    async with await asyncio.start_unix_server(haproxy, socket):
        recoveries = Recoveries("http://test", tmp_path, list, 2, "a", lambda: now_s)
        assert await recoveries.working() == {"store", "haproxy"}
        found["engine"] = [1, 5]
        assert "engine" not in await recoveries.working(), "its process is there, and takes no requests"
        recoveries.begin("engine", 90.0)
        measuring = asyncio.create_task(recoveries.run())
        assert await recoveries.settle(0.0) == {"engine", "ingress", "placement", "node"}
        replicas[1]["state"] = "running"
        while not recoveries.slowest_s:
            await asyncio.sleep(0.001)
        assert recoveries.slowest_s == {"engine": 10.0}
        statuses[1], overview["scaling_decisions"] = "UP 1/2", []
        assert await recoveries.settle(0.0) == set()
        measuring.cancel()
    socket.unlink(missing_ok=True)
    assert await recoveries.working() == {"engine", "placement", "store", "haproxy"}, "HAProxy names no ingress"


async def test_a_disk_is_full_for_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(events_module, "STOPPED_S", 0.05)
    nothing: Any = None
    with small_disk(tmp_path / "disk") as disk:
        faults = Faults(list, [], None, nothing, disk, ProxyOutages(), nothing, random.Random(0)).faults
        if disk is None:
            assert "fill the disk" not in faults, "without the right to mount one nothing else is filled"
            return
        filling = asyncio.ensure_future(faults["fill the disk"]())
        await asyncio.sleep(0)
        assert shutil.disk_usage(disk).free == 0
        with pytest.raises(OSError, match="No space left"):
            (disk / "more").write_bytes(bytes(1 << 16))
        assert await filling == str(disk)
        (disk / "more").write_bytes(bytes(1 << 16))


@pytest.mark.skipif(find_postgres() is None, reason="PostgreSQL is not installed; the command leaves its deeds out too")
def test_a_database_that_was_killed_comes_back_with_what_it_had() -> None:
    programs = find_postgres()
    assert programs is not None
    server = PostgresServer(programs)
    try:
        url = server.new_database()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept (id int)")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url)
        server.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    finally:
        server.stop()
