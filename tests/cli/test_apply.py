"""`polylora apply`: the difference, the changes, the exit status; applying twice changes nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from app.cli.apply import ApiError, DesiredState, difference, read_desired_state
from app.cli.main import main
from app.engine.errors import ConfigError

ROOT = Path(__file__).parents[2]


class FakeService(ThreadingHTTPServer):
    """The routes that `apply` uses, over two dictionaries for each project; pages of two."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tables: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
        self.changes: list[str] = []

    @property
    def adapters(self) -> dict[str, dict[str, Any]]:
        return self.tables["", "loras"]

    @adapters.setter
    def adapters(self, adapters: dict[str, dict[str, Any]]) -> None:
        self.tables["", "loras"] = adapters

    @property
    def aliases(self) -> dict[str, dict[str, Any]]:
        return self.tables["", "aliases"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: FakeService

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        _, _, kind, *name = parts.path.split("/")
        project = self.headers.get("OpenAI-Project", "")
        table = self.server.tables[project, kind]
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        status, answer = 200, {}
        if self.command == "GET":
            after = parse_qs(parts.query).get("after", [""])[0]
            rest = [{"id": key} | table[key] for key in sorted(table) if key > after]
            answer = {"data": rest[:2], "has_more": len(rest) > 2, "last_id": rest[:2][-1]["id"] if rest else None}
        else:
            self.server.changes.append(f"{self.command} {kind} {project}{name[0] if name else body['name']}")
            if body.get("path") == "broken":
                status, answer = 400, {"error": {"message": "tensor 'x' has NaN"}}
            elif self.command == "DELETE":
                del table[name[0]]
            elif self.command == "POST":
                assert parts.query == "wait=true"
                key, source = body.pop("name"), body.pop("path")
                table[key] = {"source": source} | body
            else:
                table.setdefault(name[0], {}).update(body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


WANTED = """
adapters:
  - {name: a, path: a}
  - {name: b, path: b, pinned: true}
  - {name: c, path: c, traffic_weight: 2.5}
aliases:
  - {name: app, targets: {a: 95, b: 5}}
"""


def test_adds_updates_and_removes_only_when_told(
    service: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text(WANTED)

    def apply(*options: str) -> tuple[int, list[str], list[str]]:
        service.changes.clear()
        status = main(["apply", str(file), "--url", service.url, *options])
        return status, capsys.readouterr().out.splitlines(), service.changes

    status, lines, changes = apply("--dry-run")
    assert (status, changes) == (0, [])
    assert lines == ["+ a  load a", "+ b  load b", "+ c  load c", "+ app  alias of 95 % a + 5 % b", "4 changes to make"]
    status, _, changes = apply()
    assert (status, changes) == (0, ["POST loras a", "POST loras b", "POST loras c", "PUT aliases app"])
    assert service.adapters["b"] == {"source": "b", "pinned": True, "traffic_weight": 1.0}
    status, lines, changes = apply()
    assert (status, lines, changes) == (0, ["0 changes made"], [])
    assert apply("--dry-run")[1] == ["nothing to change"]

    service.adapters["old"] = {"source": "old", "pinned": False, "traffic_weight": 1.0}
    service.aliases["past"] = {"targets": {"old": 1.0}}
    file.write_text(WANTED.replace("path: a", "path: a2").replace("2.5", "3").replace("b: 5}", "b: 45}"))
    status, lines, changes = apply()
    assert (status, changes) == (0, ["POST loras a", "PATCH loras c", "PUT aliases app"])
    assert lines == [
        "~ a  source a -> a2",
        "~ c  traffic_weight 2.5 -> 3.0",
        "~ app  alias of 95 % a + 5 % b -> 67.8571 % a + 32.1429 % b",
        "  past  alias, not in the file: stays; --prune removes it",
        "  old  adapter, not in the file: stays; --prune removes it",
        "3 changes made",
    ]
    status, _, changes = apply("--prune")
    assert (status, changes) == (0, ["DELETE aliases past", "DELETE loras old"]), "aliases first"
    assert apply("--reload")[2] == ["POST loras a", "POST loras b", "POST loras c"]


def test_each_project_has_its_own_part_of_the_file(service: FakeService, tmp_path: Path) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text(
        "adapters: [{name: a, path: a, tenant: p1}, {name: a, path: b}, {name: a, path: c, tenant: p2}]\n"
        "aliases: [{name: x, targets: {a: 1}, tenant: p2}]"
    )
    service.tables["p1", "loras"] = {"old": {"source": "old"}}
    service.tables["p3", "loras"] = {"old": {"source": "old"}}
    command = ["apply", str(file), "--url", service.url, "--prune"]
    assert main(command) == 0
    assert service.changes == [
        "POST loras a", "POST loras p1a", "DELETE loras p1old", "POST loras p2a", "PUT aliases p2x",
    ]  # fmt: skip
    assert {project: table["a"]["source"] for (project, kind), table in service.tables.items() if "a" in table} == {
        "": "b", "p1": "a", "p2": "c",
    }  # fmt: skip
    service.changes.clear()
    assert main(command) == 0
    assert service.changes == []


def test_combinations_that_are_parts_of_each_other_are_refused() -> None:
    entries = [{"name": name, "combine": {"adapters": [{"name": other}]}} for name, other in ("xy", "yx")]
    with pytest.raises(ConfigError, match="the combinations x, y are parts of each other"):
        difference(DesiredState.model_validate({"adapters": entries}), {}, {}, prune=False, reload=False)


@pytest.mark.parametrize(
    "text", ["", "{}", "# adapters: [{name: a, path: a}]", "aliases: [{name: app, targets: {a: 1}}]"]
)
def test_a_file_without_adapters_prunes_none_unless_it_says_so(
    service: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text(text)
    service.adapters |= {name: {"source": name, "pinned": False, "traffic_weight": 1.0} for name in "ab"}
    for options in ([], ["--dry-run"]):
        assert main(["apply", str(file), "--url", service.url, "--prune", *options]) == 1
        assert "would remove all 2 of the service; write 'adapters: []'" in capsys.readouterr().err
    assert service.changes == []
    file.write_text("adapters: []")
    assert main(["apply", str(file), "--url", service.url, "--prune"]) == 0
    assert service.changes == ["DELETE loras a", "DELETE loras b"]
    file.write_text("")
    assert main(["apply", str(file), "--url", service.url, "--prune"]) == 0, "there is nothing to lose"


def test_one_failure_stops_nothing_else(
    service: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.yaml").write_text("adapters: [{name: x, path: broken}, {name: y, path: y}]")
    assert main(["apply", str(tmp_path / "f.yaml"), "--url", service.url]) == 1
    out = capsys.readouterr().out
    assert "! x  tensor 'x' has NaN" in out
    assert out.endswith("1 changes made, 1 failed\n")
    assert list(service.adapters) == ["y"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adapters: [", "not valid YAML"),
        ("adaptors: []", "adaptors is an unknown key; did you mean 'adapters'"),
        ("adapters: [{name: x, path: x, descripton: y}]", r"adapters\.0\.descripton is an unknown .*'description'"),
        ("adapters: [{name: x}]", "either path, .* or combine"),
        ("adapters: [{name: x, path: x, combine: {adapters: [{name: y}]}}]", "either path, .* or combine"),
        ("adapters: [{name: x, combine: {adapters: []}}]", r"adapters\.0\.combine\.adapters"),
        ("adapters: [{name: x, path: x, lazy: true, pinned: true}]", "lazy is for an adapter"),
        ("adapters: [{name: x, combine: {adapters: [{name: y}]}, lazy: true}]", "lazy is for an adapter"),
        ("adapters: [{name: ../x, path: x}]", r"adapters\.0\.name"),
        ("adapters: [{name: x, path: x, traffic_weight: -1}]", "traffic_weight"),
        ("adapters: [{name: x, path: x, traffic_weight: 1.0e+308}]", "traffic_weight"),
        ("adapters: [{name: x, path: x}, {name: x, path: y}]", "'x' is used twice"),
        ("adapters: [{name: x, path: x}]\naliases: [{name: x, targets: {x: 1}}]", "'x' is used twice"),
        ("aliases: [{name: x, targets: {}}]", r"aliases\.0\.targets"),
        ("aliases: [{name: x, targets: {y: 0}}]", "greater than 0"),
        ("3", "dictionary"),
    ],
)
def test_a_file_that_means_nothing_changes_nothing(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_desired_state(tmp_path / "f.yaml")


@contextlib.contextmanager
def answered_by(answer: bytes) -> Iterator[str]:
    """A URL that one request may be sent to, and the bytes that come back."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def reply() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def test_without_a_service_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.yaml").write_text("")
    for url in ("http://127.0.0.1:9", "nonsense"):
        assert main(["apply", str(tmp_path / "f.yaml"), "--url", url]) == 1
        assert capsys.readouterr().err.startswith(f"polylora apply: no answer from {url}: ")
    assert main(["apply", str(tmp_path / "absent.yaml")]) == 1
    assert issubclass(ApiError, Exception)


def test_a_service_with_keys_says_where_one_goes(capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"error": {"message": "a key is needed"}}'
    answer = b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with answered_by(answer) as url:
        assert main(["status", "--url", url]) == 1
    assert "a key is needed; set POLYLORA_ADMIN_KEY to an admin key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.9\r\n", "no answer from"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}", "no answer from"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "not a list of this service"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "not a list of this service"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\nnone", "status 404"),
    ],
)
def test_a_url_of_something_else_is_one_line(
    answer: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.yaml").write_text("adapters: []")
    with answered_by(answer) as url:
        assert main(["apply", str(tmp_path / "f.yaml"), "--url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert line.endswith(("--url sets the service's address", "check --url"))


def test_the_shipped_file_is_read() -> None:
    wanted = read_desired_state(ROOT / "configs" / "adapters.yaml")
    changes = difference(wanted, {}, {}, prune=True, reload=False)
    assert [change.sign for change in changes] == ["+"] * 4
