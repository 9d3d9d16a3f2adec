"""`polylora serve` before anything runs: what Ray is told, and what of Ray's inside is relied on."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from app.cli import preflight, ray_env, startup
from app.cli import serve as serving
from app.cli.config_file import address_in
from app.cli.main import main
from app.cli.ray_env import (
    HA_PROXY,
    HA_PROXY_PORTS,
    HA_PROXY_SWITCHES,
    ONE_MACHINE_SWITCHES,
    RAY_SWITCHES,
    ha_proxy_places,
    has_ha_proxy,
    set_ray_switches,
)
from app.engine.errors import ConfigError
from load_tests.service import free_port, serve_arguments
from tests.e2e.tiny import save_tiny_model

ROOT = Path(__file__).parents[2]


def test_switches_are_added_and_never_overruled(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    tmp_path.chmod(0o700)
    assert set_ray_switches(environ) is has_ha_proxy()
    expected = RAY_SWITCHES + ONE_MACHINE_SWITCHES + (HA_PROXY_SWITCHES if has_ha_proxy() else ())
    places = set(ha_proxy_places()) if has_ha_proxy() else set()
    assert environ.keys() == {name for name, _, _ in expected} | places | {"RAY_TMPDIR"}
    assert {name: environ[name] for name, _, _ in expected} == {name: value for name, value, _ in expected}
    own = {name: "own" for name, _, _ in RAY_SWITCHES + ONE_MACHINE_SWITCHES + HA_PROXY_SWITCHES} | {HA_PROXY: "0"}
    own["RAY_TMPDIR"] = str(tmp_path)
    before = dict(own)
    assert set_ray_switches(own) is False
    assert own == before
    assert set_ray_switches({HA_PROXY: "1"}) is True


def test_the_folder_that_ha_proxy_shares_with_frames_is_made_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_env, "user_folder", lambda: tmp_path / "own")
    environ = {HA_PROXY: "1"}
    assert set_ray_switches(environ) is True
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0
    assert environ["RAY_SERVE_HAPROXY_SOCKET_PATH"] == str(tmp_path / "own" / "ha" / "admin.sock")
    assert environ["RAY_TMPDIR"] == str(tmp_path / "own")


def test_a_folder_for_ray_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Ray gives everybody every right to its own folders below it."""
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"can be entered by other users; .*chmod 700"):
        set_ray_switches({"RAY_TMPDIR": str(tmp_path), HA_PROXY: "0"})
    assert tmp_path.stat().st_mode & 0o777 == 0o755, "it may be for other things as well"
    joined = {"RAY_TMPDIR": str(tmp_path), HA_PROXY: "0", "RAY_ADDRESS": "10.0.0.1:6379"}
    set_ray_switches(joined)
    assert joined.keys().isdisjoint(name for name, _, _ in ONE_MACHINE_SWITCHES)


def test_the_paths_of_ray_s_sockets_are_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_env.os, "getuid", lambda: 2**32 - 2)
    session = "ray/session_2026-11-26_05-30-27_738223_4194304/sockets/plasma_store.12"
    assert len(str(ray_env.user_folder() / session)) <= 107


SWITCHES = RAY_SWITCHES + ONE_MACHINE_SWITCHES + HA_PROXY_SWITCHES


@pytest.mark.parametrize("name", [*(name for name, _, _ in SWITCHES), *ha_proxy_places()])
def test_this_version_of_ray_knows_the_switch(name: str) -> None:
    """A switch that is renamed is ignored in silence."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.submodule_search_locations is not None
    folder = Path(ray.submodule_search_locations[0])
    parts = ("serve/_private", "_common/usage", "_private", "dashboard")
    files = (file for part in parts for file in (folder / part).rglob("*.py"))
    is_python = any(f'"{name}"' in file.read_text(encoding="utf-8") for file in files)
    assert is_python or f"{name}\0".encode() in (folder / "_raylet.so").read_bytes()


@pytest.mark.parametrize("name", [name for name, _ in HA_PROXY_PORTS])
def test_a_port_of_ha_proxy_that_is_taken_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for other, _ in HA_PROXY_PORTS:
        monkeypatch.delenv(other, raising=False)  # it does not listen then
    preflight.check_ha_proxy_ports(os.environ)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv(name, str(port))
        with pytest.raises(ConfigError, match=rf":{port} .*set {name} to another"):
            preflight.check_ha_proxy_ports(os.environ)


@pytest.fixture
def ray_inits(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> SimpleNamespace:
        calls.append(options)
        return SimpleNamespace(dashboard_url="127.0.0.1:8266")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return calls


@pytest.mark.parametrize("dashboard", [False, True])
def test_a_ray_of_our_own_has_a_dashboard_when_asked(
    ray_inits: list[dict[str, Any]], dashboard: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    serving._start_ray(dashboard)
    assert ("http://127.0.0.1:8266" in capsys.readouterr().err) is dashboard  # Ray's own choice where 8265 is taken
    (options,) = ray_inits
    assert options["include_dashboard"] is dashboard
    assert "runtime_env" not in options
    assert os.environ["PYTHONPATH"] == f"{os.getcwd()}{os.pathsep}/elsewhere"


@pytest.mark.parametrize("limit", [None, 10 << 30])
def test_the_object_store_is_sized_by_a_limit_that_ray_does_not_see(
    ray_inits: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(serving, "hidden_limit_bytes", lambda: limit)
    serving._start_ray(dashboard=False)
    (options,) = ray_inits
    assert options.get("object_store_memory") == (3 << 30 if limit else None)


@pytest.mark.parametrize(
    ("num_failures", "message", "num_tries"), [(1, "timed out", 2), (2, "timed out", 2), (1, "no", 1)]
)
def test_ray_is_started_a_second_time_if_it_did_not_start_in_time(
    num_failures: int, message: str, num_tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def init(**_: Any) -> SimpleNamespace:
        calls.append("init")
        if calls.count("init") <= num_failures:
            raise RuntimeError(message)
        return SimpleNamespace()

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: calls.append("shutdown")))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if num_failures < num_tries:
        serving._start_ray(dashboard=False)
    else:
        with pytest.raises(serving.StartError, match=f"Ray does not start: {message}"):
            serving._start_ray(dashboard=False)
    assert calls == ["init", "shutdown", "init"][: 2 * num_tries - 1]


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_first_request_is_one_that_would_be_answered(needs_key: bool) -> None:
    said = serving._greeting("http://h:1", ["base", "sql"], 1.0, needs_key=needs_key, is_encoder=False)
    assert "http://h:1/v1/chat/completions" in said
    assert ('-H "Authorization: Bearer $KEY"' in said) is needs_key
    assert ("polylora tenants create" in said) is needs_key


def test_an_encoder_greets_with_a_request_that_it_can_answer() -> None:
    said = serving._greeting("http://h:1", ["it"], 1.0, needs_key=False, is_encoder=True)
    assert "http://h:1/v1/embeddings" in said
    assert '{"model": "it", "input": ' in said
    assert "messages" not in said


def test_a_cluster_that_is_joined_is_told_where_we_import_from(
    ray_inits: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    serving._start_ray(dashboard=True)
    (options,) = ray_inits
    assert "include_dashboard" not in options  # Ray refuses it: the cluster is there
    assert options["runtime_env"] == {"env_vars": {"PYTHONPATH": f"{os.getcwd()}{os.pathsep}/elsewhere"}}
    assert os.environ["PYTHONPATH"] == "/elsewhere"


@pytest.mark.parametrize(
    ("application", "file", "expected"),
    [
        ({}, {}, "http://h:1/health"),
        ({"route_prefix": "/"}, {}, "http://h:1/health"),
        ({"route_prefix": "/llm"}, {"proxy_location": "EveryNode"}, "http://h:1/llm/health"),
        ({"route_prefix": None}, {}, None),
        ({}, {"proxy_location": "Disabled"}, None),
    ],
)
def test_ready_is_asked_where_clients_come_in(
    application: dict[str, Any], file: dict[str, Any], expected: str | None
) -> None:
    others = [{"import_path": "another:app"}, {"import_path": "app.main:build"} | application]
    assert serving._health_url(file | {"applications": others}, "http://h:1") == expected


def test_only_a_200_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # never asked for this machine's own door
    statuses = iter([503, 200])

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(next(statuses))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/health"
            assert not startup.answers(url)
            assert startup.answers(url)
        finally:
            server.shutdown()
            thread.join()
    assert not startup.answers(url)


@pytest.mark.parametrize(
    ("engine", "extras"),
    [
        ("{num_kv_blocks: 8}", set()),
        ("{cpu: {num_threads: 1}}", set()),
        ("{xla: {}}", {"jax"}),
        ("\n  num_kv_blocks: 0\n  cuda:\n    index: 1", {"cuda"}),
        ("{num_kv_blocks: 0, cuda: {index: 1}}", {"cuda"}),
        ("{} # no xla: here", set()),
    ],
)
def test_make_installs_what_the_engines_section_needs(engine: str, extras: set[str], tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"engine: {engine}\n")
    for config, expected in ((path, extras), ("configs/serve.yaml", set()), ("configs/serve-jax.yaml", {"jax"})):
        command = ["make", "--dry-run", "--always-make", "serve", f"CONFIG={config}"]
        recipe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert set(re.findall(r"'\.\[(\w+)\]'", recipe)) == expected
        assert ("install torch==" in recipe) is ("cuda" in expected)


@pytest.mark.parametrize(
    ("options", "port", "says"),
    [
        ("", 70_000, "port 70000"),
        ("", 0, "port 0 "),
        ("http_options: {port: '8734'}", None, "port '8734'"),
        ("http_options: {port: 65536}", None, "port 65536"),
        ("http_options: {port: true}", None, "port True"),
        ("http_options: {port: }", None, "port None"),
        ("http_options: {host: 5}", 8734, "host is 5"),
        ("http_options: 8734", None, "http_options is 8734"),
    ],
)
def test_an_address_that_is_none_is_told_before_anything_starts(
    tmp_path: Path, options: str, port: int | None, says: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"{options}\napplications: [{{import_path: 'app.main:build'}}]\n")
    with pytest.raises(ConfigError, match=re.escape(says)):
        serving.serve_until_stopped(path, None, port, dashboard=False)


def test_what_the_file_leaves_open_about_the_address_has_a_default() -> None:
    for options in ({}, {"http_options": None}, {"http_options": {"host": None, "keep_alive_timeout_s": 5}}):
        document: dict[str, Any] = dict(options)
        assert address_in(document, None, None) == ("127.0.0.1", 8000)
        assert document["http_options"]["port"] == 8000
    assert document["http_options"]["keep_alive_timeout_s"] == 5
    assert address_in({"http_options": {"host": "::", "port": 8734}}, None, None) == ("::", 8734)
    assert address_in({"http_options": {"host": "::", "port": 8734}}, "0.0.0.0", 8735) == ("0.0.0.0", 8735)


def test_a_missing_jax_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jax" else pytest.fail(name))
    with pytest.raises(ConfigError, match=r"jax is not installed: pip install 'polylora\[jax\]'"):
        serving.serve_until_stopped(ROOT / "configs/serve-jax.yaml", None, None, dashboard=False)


def test_a_missing_gpu_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    args = {"engine": {"cuda": {}}, "model": {"uri": str(tmp_path)}}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "app.main:build", "args": args}]}))
    with pytest.raises(ConfigError, match="torch finds no CUDA device here"):
        serving.serve_until_stopped(path, None, free_port(), dashboard=False)
    assert main(["doctor", "--config", str(path)]) == 1
    assert "FAIL  engine: engine.cuda is set but torch finds no CUDA device here" in capsys.readouterr().out


def test_a_context_longer_than_the_model_takes_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model(tmp_path / "model", max_positions=512)
    args = {"model": {"uri": str(tmp_path / "model"), "name": "tiny"}, "engine": {"max_model_len": 513}}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "app.main:build", "args": args}]}))
    monkeypatch.setattr(serving, "serve_until_stopped", lambda *_, **__: pytest.fail("it was started"))
    assert main(["serve", "--config", str(path)]) == 1
    assert "engine.max_model_len is 513 but model 'tiny' has 512 positions" in capsys.readouterr().err


def test_a_placement_policy_that_is_none_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("POLYLORA_STATE_DIR", str(tmp_path / "state"))
    application = {"import_path": "app.main:build", "args": {"placement": {"policy": "stiky"}}}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    with pytest.raises(ConfigError, match=r"'stiky' is not one of least_loaded, .*sticky"):
        serving.serve_until_stopped(path, None, free_port(), dashboard=False)


def test_measurements_start_the_service_as_make_does() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^serve:.*\n\t@exec \$\(BIN\)/polylora (.*)$", makefile, re.MULTILINE)
    assert recipe is not None
    words = recipe[1].replace("$(if $(DASHBOARD),--dashboard)", "")
    for name, value in (("CONFIG", "configs/serve.yaml"), ("HOST", "127.0.0.1"), ("PORT", "8000")):
        assert re.search(rf"^{name} \?= {re.escape(value)}$", makefile, re.MULTILINE)
        words = words.replace(f"$({name})", value)
    assert shlex.split(words) == serve_arguments("configs/serve.yaml", 8000)
