"""The first thing a new user does: `polylora serve` with the default configuration."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.cli.serve import LOOK_INTERVAL_S
from load_tests.process_tree import processes
from load_tests.service import ROOT
from tests.e2e.process import ServiceProcess

pytestmark = pytest.mark.e2e


def test_the_default_service_starts_answers_and_stops(demo: ServiceProcess) -> None:
    """Ends the service, and so has to be the last test of this folder."""
    deadline_s = time.monotonic() + 600
    while "ctrl-C stops it" not in demo.tail():
        assert time.monotonic() < deadline_s, demo.tail()
        time.sleep(0.2)
    greeting = demo.tail()
    assert re.search(rf"Ready after \d+ s: {re.escape(demo.url)}", greeting)
    found = processes(demo.process.pid)
    assert found.keys() >= {"store", "placement", "ingress", "engine", "haproxy", "controller"}
    assert "dashboard" not in found  # a dozen processes; nobody asked for it
    # The line that is printed to be pasted works as it stands.
    curl = greeting[greeting.index("curl ") : greeting.index("\n\nctrl-C")].replace("\\\n", " ")
    answer = json.loads(subprocess.run([*shlex.split(curl), "-sS"], capture_output=True, check=True).stdout)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0
    told_in_the_log_and_the_status(demo)
    haproxy_is_back_when_it_is_killed(demo)
    a_lost_engine_is_told(demo)
    # Whoever is being answered when it is told to end is answered to the end.
    body = {"model": "sql", "prompt": "one", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{demo.url}/v1/completions", json=body, timeout=600) as response:
        lines = response.iter_lines()
        next(lines)
        demo.process.send_signal(signal.SIGINT)
        statuses = statuses_until_refused(f"{demo.url}/v1/models", lines)
        assert statuses <= {200, 503}, "a client does not ask again after a 404"
    assert demo.process.wait(300) == 0
    farewell = demo.tail().partition("ctrl-C stops it.")[2].strip().split("\n")
    notice, *told, stopping, stopped = (line.removeprefix("polylora: ") for line in farewell)
    assert notice.startswith("there are no API keys")
    assert all(
        re.fullmatch(r"1 of 1 EngineReplica lost; .*|1 EngineReplica running again after \d+ s", line) for line in told
    )
    assert stopping.startswith("stopping when running requests have ended")
    assert stopped == "stopped"


def told_in_the_log_and_the_status(process: ServiceProcess) -> None:
    log = re.findall(r"the log is (\S+)", process.tail())[0]
    lines = Path(log).read_text()
    for words in ("adapter loaded name=sql", "engine replica ready"):
        assert words in lines
    command = [sys.executable, "-m", "app.cli.main", "status", "--url", process.url]
    done = subprocess.run(command, cwd=ROOT, env=process.environment, capture_output=True, text=True, check=True)
    assert f"{process.url}: ready" in done.stdout


def haproxy_is_back_when_it_is_killed(process: ServiceProcess) -> None:
    """Ray would start another after half a minute; its supervisor does at once."""
    running = processes(process.process.pid)["haproxy"]
    (pid,) = [pid for pid in running if "bin/haproxy" in command_of(pid)]
    (supervisor,) = [other for other in running if parent_of(other) not in running]
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 600
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{process.url}/readyz", timeout=30).status_code == 200:
                break
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert supervisor in processes(process.process.pid)["haproxy"], "Ray has seen nothing of it"


def a_lost_engine_is_told(process: ServiceProcess) -> None:
    """By a line on the terminal and in the log; and that there is another one."""
    log = Path(re.findall(r"the log is (\S+)", process.tail())[0])
    deadline_s = time.monotonic() + 600
    while "1 of 1 EngineReplica lost; Serve starts another" not in process.tail():
        assert time.monotonic() < deadline_s, process.tail()
        # Whoever is back between two looks goes unnoticed: then the next one is killed.
        for pid in processes(process.process.pid).get("engine", ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_INTERVAL_S + 1.0)
    process.wait_until_said("1 EngineReplica running again after", 600)
    for words in ("1 of 1 EngineReplica lost", "1 EngineReplica running again after"):
        assert words in log.read_text()


def parent_of(pid: int) -> int:
    return int(re.findall(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])


def command_of(pid: int) -> str:
    """Its program: a supervisor's has HAProxy's name in an argument."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]


def statuses_until_refused(url: str, lines: Iterator[str]) -> set[int]:
    """What others are answered while a stream is read to its end and the service drains."""
    statuses, events = set(), []
    for line in lines:
        events += [line] if line else []
        with contextlib.suppress(httpx.TransportError):
            statuses.add(httpx.get(url, timeout=30).status_code)
    assert events[-1] == "data: [DONE]"
    return statuses
