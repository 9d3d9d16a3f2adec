"""Short commands for a service: what they ask and what they print; and completion in a shell."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from app.cli import client_commands
from app.cli.completion import completion_script
from app.cli.main import main, make_parser
from app.cli.status import event_line

NAME = "some-org/legal"
LORA = {"id": NAME, "state": "LOADED", "generation": 2, "max_rank": 8, "size_bytes": 3 << 20, "pinned": True,
        "source": "hf://some-org/legal@main"}  # fmt: skip
ALIAS = {"id": "prod", "targets": {NAME: 95.0, "sql": 5.0}, "version": 3}
EVENTS = [{"id": number, "name": NAME, "event": f"event {number}", "created": 0.0, "detail": None} for number in (2, 1)]
DELTAS = ({"role": "assistant"}, {"content": "Hel"}, {"content": "lo"})
STREAM = "".join(
    f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in DELTAS
)  # fmt: skip


class Api:
    """A service that answers from a table, and takes a note of each request."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, str, Any]] = []
        self.refuses_with: int | None = None
        page = {"has_more": False, "last_id": None}
        self.answers: dict[str, Any] = {
            "GET /v1/loras": page | {"data": [LORA]},
            "GET /v1/aliases": page | {"data": [ALIAS]},
            "POST /v1/loras": LORA,
            f"POST /v1/loras/{NAME}/load": LORA,
            f"DELETE /v1/loras/{NAME}": LORA | {"state": "REMOVED"},
            "POST /v1/replicas/ab12/drain": {"id": "ab12", "object": "replica", "state": "draining"},
            "GET /v1/events": page | {"data": EVENTS},
        } | {f"{verb} /v1/aliases/prod{end}": ALIAS for verb, end in
             (("GET", ""), ("PUT", ""), ("DELETE", ""), ("POST", "/promote"), ("POST", "/rollback"))}  # fmt: skip


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            api.asked.append((self.command, self.path, body))
            status, content = 200, json.dumps(api.answers.get(f"{self.command} {self.path.partition('?')[0]}")).encode()
            if self.path == "/v1/chat/completions":
                answer = {"choices": [{"message": {"content": "Hello"}}]}
                content = (STREAM + "data: [DONE]\n\n" if body.get("stream") else json.dumps(answer)).encode()
            if api.refuses_with is not None:
                status, content = api.refuses_with, json.dumps({"error": {"message": "not with this key"}}).encode()
            elif content == b"null":
                status, content = 404, json.dumps({"error": {"message": "there is no such thing"}}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = do

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}"
    yield api
    server.shutdown()
    server.server_close()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(api: Api, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: str) -> tuple[int, str, str]:
        status = main([*words, "--url", api.url])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return command


@pytest.mark.parametrize(
    ("words", "asked", "says"),
    [
        (["ls"], ("GET", "/v1/aliases?limit=1000", None), ["some-org/legal", "95", "3.0", "pinned"]),
        (["load", NAME, "hf://o/x@main", "--pin"],
         ("POST", "/v1/loras", {"name": NAME, "path": "hf://o/x@main", "wait": True, "lazy": False, "pinned": True}),
         ["generation 2"]),
        (["load", NAME, "x", "--lazy", "--description", "law"],
         ("POST", "/v1/loras", {"name": NAME, "path": "x", "wait": False, "lazy": True, "description": "law"}), []),
        (["load", NAME], ("POST", f"/v1/loras/{NAME}/load", None), ["LOADED"]),
        (["unload", NAME], ("DELETE", f"/v1/loras/{NAME}", None), ["REMOVED"]),
        (["alias"], ("GET", "/v1/aliases?limit=1000", None), ["prod: some-org/legal=95, sql=5 (version 3)"]),
        (["alias", "prod"], ("GET", "/v1/aliases/prod", None), ["some-org/legal=95, sql=5 (version 3)"]),
        (["alias", "prod", f"{NAME}@2=95", "sql"],
         ("PUT", "/v1/aliases/prod", {"targets": {f"{NAME}@2": 95.0, "sql": 1.0}}), ["version 3"]),
        (["alias", "prod", "--promote", NAME], ("POST", "/v1/aliases/prod/promote", {"target": NAME}), []),
        (["alias", "prod", "--rollback"], ("POST", "/v1/aliases/prod/rollback", {}), []),
        (["alias", "prod", "--rollback", "2"], ("POST", "/v1/aliases/prod/rollback", {"version": 2}), []),
        (["alias", "prod", "--remove"], ("DELETE", "/v1/aliases/prod", None), ["removed"]),
        (["drain", "ab12"], ("POST", "/v1/replicas/ab12/drain", None), ["ab12: draining"]),
        (["drain", "ab12", "--force"], ("POST", "/v1/replicas/ab12/drain?force=true", None), []),
        (["logs", NAME], ("GET", "/v1/events?limit=50&name=some-org%2Flegal", None), ["event 1", "event 2"]),
    ],
)  # fmt: skip
def test_commands(run: Run, api: Api, words: list[str], asked: Any, says: list[str]) -> None:
    status, out, _ = run(*words)
    assert status == 0
    assert api.asked[-1] == asked
    assert all(text in out for text in says), out
    status, out, _ = run(*words, "--json")
    assert status == 0
    assert all(json.loads(line) for line in out.splitlines())


def test_a_chat_streams_or_is_json(run: Run, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("chat", NAME, "hi", "--system", "be brief", "--max-tokens", "5")[:2] == (0, "Hello\n")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert api.asked[-1][2]["messages"] == messages
    status, out, _ = run("chat", NAME, "hi", "--json")
    assert (status, json.loads(out)["choices"][0]["message"]["content"]) == (0, "Hello")
    answers = iter(["one", "", "two"])

    def ask(_: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ask)
    assert run("chat", NAME)[:2] == (0, "Hello\nHello\n")
    roles = [message["role"] for message in api.asked[-1][2]["messages"]]
    assert roles == ["user", "assistant", "user"], "the conversation goes on"


def test_a_load_s_warnings_are_printed(run: Run, api: Api) -> None:
    api.answers["POST /v1/loras"] = LORA | {"warnings": ["another base model"]}
    assert run("load", NAME, "a")[1].splitlines()[1:] == ["warning: another base model"]


def test_logs_go_on_with_what_is_new(run: Run, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([3, 4])

    def sleep(_: float) -> None:
        try:
            number = next(turns)
        except StopIteration:
            raise KeyboardInterrupt from None
        events = api.answers["GET /v1/events"]
        events["data"] = [EVENTS[0] | {"id": number, "event": f"event {number}"}, *events["data"]]

    monkeypatch.setattr(client_commands.time, "sleep", sleep)
    status, out, _ = run("logs", "-f")
    assert status == 130
    assert [line.split("  ")[1] for line in out.splitlines()] == ["event 1", "event 2", "event 3", "event 4"]


@pytest.mark.parametrize("words", [["ls"], ["load", "a", "b"], ["unload", "a"], ["alias", "a"], ["alias"], ["logs"],
                                   ["chat", "a", "hi"], ["ps"]])  # fmt: skip
def test_without_a_service_one_line_says_so(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.status._applications", dict)
    assert main([*words, "--url", "http://127.0.0.1:9"]) == 1
    printed = capsys.readouterr()
    assert "no answer from http://127.0.0.1:9" in printed.out + printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["alias", "prod", "a=x"], "not an adapter"),
        (["alias", "prod", "a", "--remove"], "either adapters"),
        (["alias", "--promote", "a"], "name the alias"),
        (["load", "a", "--pin"], "without a path"),
        (["logs", "-n", "-1"], "--lines"),
        (["alias", "nothing"], "no such thing"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, words: list[str], says: str) -> None:
    status, _, err = run(*words)
    assert status == 1
    assert says in err


def test_completion_knows_every_command() -> None:
    commands = make_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for shell in ("bash", "zsh", "fish"):
        script = completion_script(make_parser(), shell)
        assert all(name in script for name in (*commands, "rotate-salt"))
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["polylora", "unl"], ["unload"]),
        (["polylora", "tenants", "rot"], ["rotate-salt"]),
        (["polylora", "chat", "sql", "--max"], ["--max-tokens"]),
        (["polylora", "completion", "f"], ["fish"]),
    ],
)
def test_bash_completes(line: list[str], found: list[str]) -> None:
    script = completion_script(make_parser(), "bash")
    words = " ".join(f"'{word}'" for word in line)
    script += f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _polylora; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == found


def test_options_of_bench_are_those_of_the_load_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from load_tests.http import run

    given: list[list[str]] = []
    monkeypatch.setattr(run, "main", given.append)
    assert main(["bench", "--url", "http://host", "--models", "sql"]) == 0
    assert given == [["--url", "http://host", "--models", "sql"]]


@pytest.mark.parametrize(
    ("status", "words", "way_out"),
    [
        (401, ["ls"], "; set POLYLORA_ADMIN_KEY to an admin key\n"),
        (401, ["chat", "sql", "hi"], "; set POLYLORA_ADMIN_KEY to a project's key for this command\n"),
        (403, ["chat", "sql", "hi"], "; set POLYLORA_ADMIN_KEY to a project's key for this command\n"),
        (403, ["ls"], "\n"),
    ],
)
def test_a_refused_key_names_the_key_that_the_command_needs(
    run: Run, api: Api, status: int, words: list[str], way_out: str
) -> None:
    api.refuses_with = status
    assert run(*words) == (1, "", f"polylora {words[0]}: not with this key{way_out}")


def test_an_event_is_one_line_whatever_its_detail_holds() -> None:
    event = {"created": 0.0, "event": "failed", "name": "sql", "detail": "no\n2026-01-01T00:00:00Z  loaded  sql"}
    assert "\n" not in event_line(event)
    assert event_line(event | {"detail": {"a": 1}}).endswith('{"a": 1}')
