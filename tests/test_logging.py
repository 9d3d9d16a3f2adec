"""The service's log: whole lines, for people or for programs, from several processes into one file."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from app.config import LogsConfig, load_config
from app.deployments.tenancy.auth.key_crypto import new_key
from app.logging import FILE, MAX_LINE_CHARS, LogEvent, start_log

logger = logging.getLogger("app.somewhere")


@pytest.fixture(autouse=True)
def _leave_the_logger_as_it_was() -> Iterator[None]:
    app = logging.getLogger("app")
    before, level, umask = list(app.handlers), app.level, os.umask(0o022)
    yield
    os.umask(umask)
    for handler in [handler for handler in app.handlers if handler not in before]:
        app.removeHandler(handler)
        handler.close()
    app.setLevel(level)


def written(folder: Path, kind: Literal["text", "json"], *messages: object) -> list[str]:
    path = start_log(LogsConfig(folder=str(folder), format=kind), "engine 7")
    for message in messages:
        logger.info(message)
    return path.read_text().splitlines()


def test_a_line_for_people(tmp_path: Path) -> None:
    happened = LogEvent("adapter loaded", name="sql", seconds=0.12345, reason=None, why='a "b"\nc', nothing="")
    (line,) = written(tmp_path, "text", happened)
    time, level, process, rest = line.split(maxsplit=3)
    assert time.endswith("Z")
    assert level == "INFO"
    assert process == "engine"
    assert rest.partition("] ")[2] == r'adapter loaded name=sql seconds=0.123 why="a \"b\"\nc" nothing=""'


def test_a_line_for_programs(tmp_path: Path) -> None:
    lines = written(tmp_path, "json", LogEvent("adapter loaded", name="sql", bytes=12), "words only")
    first, second = map(json.loads, lines)
    assert first.keys() == {"time", "level", "process", "pid", "message", "name", "bytes"}
    assert (first["message"], first["name"], first["bytes"]) == ("adapter loaded", "sql", 12)
    assert first["process"] == "engine 7"
    assert second["message"] == "words only"


@pytest.mark.parametrize("kind", ["text", "json"])
def test_what_others_wrote_makes_no_line_of_its_own(tmp_path: Path, kind: Literal["text", "json"]) -> None:
    forged = "no adapter 'x'\n2026-11-23T09:12:44.120Z INFO    store[812] adapter loaded\x1b[2J\u202e"
    (line,) = written(tmp_path, kind, forged)
    assert r"'x'\n2026" in line
    assert line.isprintable()


def test_the_log_and_what_else_its_process_writes_is_for_its_own_user(tmp_path: Path) -> None:
    path = start_log(LogsConfig(folder=str(tmp_path / "logs")), "engine 7")
    (tmp_path / "another").touch()
    assert [each.stat().st_mode & 0o777 for each in (path, path.parent, tmp_path / "another")] == [0o600, 0o700, 0o600]


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_line_is_bounded_and_one(tmp_path: Path, kind: Literal["text", "json"]) -> None:
    (line,) = written(tmp_path, kind, "x" * 10 * MAX_LINE_CHARS)
    assert len(line) <= MAX_LINE_CHARS


def test_starting_again_replaces_and_the_level_holds(tmp_path: Path) -> None:
    start_log(LogsConfig(folder=str(tmp_path / "old")), "a")
    path = start_log(LogsConfig(folder=str(tmp_path / "new"), level="WARNING"), "b")
    logger.info("not told")
    logger.warning("told once")
    assert path.read_text().count("\n") == 1
    assert (tmp_path / "old" / FILE).read_text() == ""


def test_a_file_that_is_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path = start_log(LogsConfig(folder=str(tmp_path)), "a")
    logger.info("one")
    path.rename(tmp_path / "polylora.log.1")
    logger.info("two")
    assert "two" in path.read_text()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    start_log(LogsConfig(folder=str(tmp_path / "file" / "logs")), "a")
    logger.info("lost")
    assert "cannot write the log" in capsys.readouterr().err


def test_processes_share_the_file(tmp_path: Path) -> None:
    code = (
        "import logging, sys; from app.config import LogsConfig; from app.logging import start_log\n"
        "start_log(LogsConfig(folder=sys.argv[1]), sys.argv[2])\n"
        "for _ in range(200): logging.getLogger('app.x').info('%s', sys.argv[2] * 500)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [process.wait() for process in processes] == [0, 0]
    words = {line.rpartition(" ")[2] for line in (tmp_path / FILE).read_text().splitlines()}
    assert words == {"a" * 500, "b" * 500}


def test_the_folder_is_in_the_state_unless_it_is_said(tmp_path: Path) -> None:
    adapters = {"state_dir": str(tmp_path)}
    assert load_config({"adapters": adapters}, environ={}).logs.folder == str(tmp_path / "logs")
    said = load_config({"adapters": adapters, "logs": {"folder": str(tmp_path / "x")}}, environ={})
    assert said.logs.folder == str(tmp_path / "x")


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_key_that_somebody_put_somewhere_is_not_written(tmp_path: Path, kind: Literal["text", "json"]) -> None:
    key = new_key(is_admin=False).value
    lines = written(tmp_path, kind, LogEvent("request", path=f"/v1/models/{key}", model=key[:40]), f"no {key}")
    assert not [line for line in lines if key[12:30] in line]
    assert all("sk-poly-..." in line for line in lines)


def logged_through(error: str, text: str) -> None:
    """The code that logs goes on, and stderr says so once."""
    assert text.count("cannot write the log") == 1
    assert error in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is full")
def test_a_full_disk_costs_the_log_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE).symlink_to("/dev/full")
    start_log(LogsConfig(folder=str(tmp_path)), "store")
    for _ in range(3):
        logging.getLogger("app.x").info("lost")
    logged_through("No space left on device", capsys.readouterr().err)
    (tmp_path / FILE).unlink()
    logging.getLogger("app.x").info("there is room")
    assert [line.rpartition(" ")[2] for line in (tmp_path / FILE).read_text().splitlines()] == ["room"]


def test_a_full_disk_may_hold_ray_s_logs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE).symlink_to("/dev/full")
    full = open("/dev/full", "w", buffering=1, encoding="utf-8")  # noqa: SIM115 -- closing it fails
    with monkeypatch.context() as streams:
        streams.setattr(sys, "stderr", full)
        start_log(LogsConfig(folder=str(tmp_path)), "store")
        logging.getLogger("app.x").info("lost")
        start_log(LogsConfig(folder="/dev/full/logs"), "store")
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_a_folder_that_is_gone_costs_the_log_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    for _ in range(2):
        start_log(LogsConfig(folder=str(folder)), "store")
        shutil.rmtree(folder)
        for _ in range(3):
            logging.getLogger("app.x").info("lost")
        logged_through("No such file or directory", capsys.readouterr().err)
        folder.mkdir()
        logging.getLogger("app.x").info("it is back")
        assert "it is back" in (folder / FILE).read_text()
