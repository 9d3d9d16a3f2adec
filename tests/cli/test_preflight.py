"""What is in the way of a start is one sentence with a way out, before Ray is started."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from app.cli import preflight
from app.cli.preflight import check_folders, check_open_files, check_port, check_preloaded
from app.config import AppConfig, load_config
from app.engine.errors import ConfigError


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppConfig:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POLYLORA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "loras" / "ckpt" / "checkpoint-10").mkdir(parents=True)
    adapters = {"roots": [str(tmp_path / "loras")], "state_dir": str(tmp_path / "state")}
    return load_config({"adapters": adapters}, environ={})


def test_folders_that_can_be_written_are_made(settings: AppConfig, tmp_path: Path) -> None:
    check_folders(settings, {})
    assert {path.name for path in tmp_path.iterdir()} == {"loras", "cache", "state", "home"}
    assert [path.name for path in (tmp_path / "state").rglob("*")] == ["logs"]


@pytest.mark.parametrize(
    ("taken", "says"),
    [
        ("cache", r"cannot write to .*/cache \(.*\), the folder of models and compiled kernels; set POLYLORA_CACHE"),
        ("state", r"cannot write to .*/state \(.*\), the folder of the registry; set POLYLORA_STATE_DIR"),
        ("home", r"cannot write to .*/home/.ray \(.*\), the folder of Ray's token; set RAY_AUTH_TOKEN"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(settings: AppConfig, tmp_path: Path, taken: str, says: str) -> None:
    (tmp_path / taken).write_text("no folder")  # root may write wherever there is one
    with pytest.raises(ConfigError, match=says):
        check_folders(settings, {})


def test_what_earlier_versions_left_open_is_closed(settings: AppConfig, tmp_path: Path) -> None:
    state, token = tmp_path / "state", tmp_path / "home" / ".ray" / "auth_token"
    state.mkdir(mode=0o755)
    token.parent.mkdir(parents=True, mode=0o755)
    token.write_text("a token")
    token.chmod(0o644)
    check_folders(settings, {})
    assert [path.stat().st_mode & 0o777 for path in (state, token.parent, token)] == [0o700, 0o700, 0o600]


def test_a_state_folder_that_anybody_could_fill_is_refused(settings: AppConfig, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    with pytest.raises(ConfigError, match="/state can be written by every user"):
        check_folders(settings, {})


@pytest.mark.parametrize(
    "environ", [{"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_ADDRESS": "10.0.0.1:6379"}]
)
def test_a_home_that_ray_does_not_need_is_not_looked_at(
    settings: AppConfig, tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "home").write_text("no folder")
    check_folders(settings, environ)


def test_a_user_without_a_home_is_told(settings: AppConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ConfigError, match="this user has no home directory; set HOME"):
        check_folders(settings, {})


def test_another_port_is_not_recommended_where_the_host_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.77:0 .*; choose another --host"):
        check_port("192.0.2.77", 0, "choose another --port")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            check_port("127.0.0.1", taken.getsockname()[1], "choose another --port")


@pytest.mark.parametrize("path", ["nothing", "../ckpt", "s3://bucket/x", "hf://acme/no-revision"])
def test_an_adapter_that_is_not_there_is_named_before_anything_starts(settings: AppConfig, path: str) -> None:
    preload = [{"name": "here", "path": "ckpt"}, {"name": "there", "path": path}]
    adapters = settings.adapters.model_dump(exclude={"signing"}) | {"preload": preload}
    with pytest.raises(ConfigError, match=rf"^adapters.preload: 'there': .*{re.escape(os.path.basename(path))}"):
        check_preloaded(load_config({"adapters": adapters}, environ={}))


@pytest.mark.parametrize(
    ("max_files", "configured", "says", "is_refused"),
    [
        (8320, {}, None, False),
        (8319, {}, "holds 4095 connections instead of 4096, .* 8319 files .* to 8320", False),
        (1024, {}, r"holds 448 connections .* \(`ulimit -Hn`, LimitNOFILE=.* to 8320", False),
        (1024, {"RAY_SERVE_HAPROXY_MAXCONN": "448"}, None, False),
        (
            1024,
            {"RAY_SERVE_HAPROXY_MAXCONN": "449"},
            "449, for which HAProxy opens 1026 files, .* to at most 448",
            True,
        ),
        (511, {}, "may open 511 files here and Ray needs 512", True),
    ],
)
def test_too_few_open_files_are_fewer_connections_or_no_start(
    monkeypatch: pytest.MonkeyPatch, max_files: int, configured: dict[str, str], says: str | None, is_refused: bool
) -> None:
    monkeypatch.setattr(preflight, "max_open_files", lambda: max_files)
    if is_refused:
        with pytest.raises(ConfigError, match=says):
            check_open_files(configured)
    elif says is None:
        assert check_open_files(configured) is None
    else:
        assert re.search(says, check_open_files(configured) or "")
