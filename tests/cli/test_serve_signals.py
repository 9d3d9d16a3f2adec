"""SIGTERM while `polylora serve` starts, serves or ends: the service is stopped, once, and the command ends well."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from app.cli import serve as serving
from app.cli.ray_env import HARD_STOP
from app.engine.errors import EngineFailure
from load_tests.service import free_port

#: What is called in turn: `status` while the service serves, which a first signal ends in any case.
PHASES = ("_deploy", "wait_until_ready", "is_open", "status", "_drain")


def phase(calls: list[str], name: str, dies_in: str) -> Callable[..., None]:
    def called(*_: Any, **__: Any) -> None:
        calls.append(name)
        if name in (dies_in, "status"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)

    return called


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A service whose Ray is not started."""
    umask = os.umask(0o022)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("POLYLORA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv(HARD_STOP, "")  # so that what is set goes again
    monkeypatch.delenv(HARD_STOP)
    for name in ("check_device", "_start_ray", "_redirect_ray_errors", "start_log", "_check_ray"):
        monkeypatch.setattr(serving, name, lambda *_, **__: None)
    monkeypatch.setattr(serving, "set_ray_switches", lambda: False)
    monkeypatch.setattr(serving, "_schema", lambda *_: SimpleNamespace(applications=[SimpleNamespace(name="polylora")]))
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "app.main:build"}]}))
    yield path
    os.umask(umask)


@pytest.mark.parametrize("dies_in", PHASES)
def test_a_sigterm_stops_what_has_started_and_the_command_ends_well(
    monkeypatch: pytest.MonkeyPatch, config: Path, dies_in: str
) -> None:
    calls: list[str] = []
    for name in {*PHASES, "_stop"} - {"status"}:
        monkeypatch.setattr(serving, name, phase(calls, name, dies_in))
    monkeypatch.setitem(
        sys.modules, "ray", SimpleNamespace(serve=SimpleNamespace(status=phase(calls, "status", dies_in)))
    )
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert serving.serve_until_stopped(config, None, free_port(), dashboard=False) == 0
    assert calls == [*PHASES[: PHASES.index(dies_in) + 1 + (dies_in == "status")], "_stop"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_service_that_has_lost_ray_ends_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    calls: list[str] = []
    for name in ("_deploy", "wait_until_ready", "is_open"):
        monkeypatch.setattr(serving, name, lambda *_, **__: None)
    monkeypatch.setattr(serving, "_stop", lambda *_: calls.append("_stop"))

    def lost() -> None:
        raise EngineFailure("Ray's raylet has ended")

    monkeypatch.setattr(serving, "_check_ray", lost)
    status = SimpleNamespace(status=lambda: pytest.fail("it would wait without end"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=status))
    with pytest.raises(EngineFailure, match="raylet"):
        serving.serve_until_stopped(config, None, free_port(), dashboard=False)
    assert calls == ["_stop"]


def test_a_haproxy_that_is_replaced_may_finish_the_longest_request(
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    args = {"limits": {"request_timeout_s": 3000.5}}
    config.write_text(yaml.safe_dump({"applications": [{"import_path": "app.main:build", "args": args}]}))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "_deploy", stop)
    monkeypatch.setattr(serving, "_stop", lambda *_: None)
    assert serving.serve_until_stopped(config, None, free_port(), dashboard=False) == 0
    assert os.environ[HARD_STOP] == "3031"
