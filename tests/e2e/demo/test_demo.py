"""The first thing a new user does: `polylora serve` with the default configuration."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time

import httpx
import pytest

from load_tests.process_tree import processes
from load_tests.service import free_port
from tests.e2e.process import ServiceProcess

pytestmark = pytest.mark.e2e


def test_the_default_service_starts_answers_and_stops() -> None:
    port = free_port()
    command = [sys.executable, "-c", "import sys; from app.cli.main import main; sys.exit(main())"]
    process = ServiceProcess([*command, "serve", "--config", "configs/serve.yaml", "--port", str(port)], port, {})
    try:
        process.wait_until_healthy(600)
        deadline_s = time.monotonic() + 600
        while "ctrl-C stops it" not in process.tail():
            assert time.monotonic() < deadline_s, process.tail()
            time.sleep(0.2)
        greeting = process.tail()
        assert (
            f"Ready after \\d+ s: {process.url}".replace("\\d+", re.findall(r"after (\d+) s", greeting)[0]) in greeting
        )
        found = processes(process.process.pid)
        assert found.keys() >= {"store", "placement", "ingress", "engine", "haproxy", "controller"}
        assert "dashboard" not in found  # a dozen processes; nobody asked for it
        # The line that is printed to be pasted works as it stands.
        curl = greeting[greeting.index("curl ") : greeting.index("\n\nctrl-C")].replace("\\\n", " ")
        answer = json.loads(subprocess.run([*shlex.split(curl), "-sS"], capture_output=True, check=True).stdout)
        assert answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens"] > 0
        # Whoever is being answered when it is told to end is answered to the end.
        body = {"model": "sql", "prompt": "one", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=600) as response:
            lines = response.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.process.wait(300) == 0
        farewell = process.tail().partition("ctrl-C stops it.")[2].split("\n")
        assert [line for line in farewell if line and not line.startswith("polylora: stop")] == []
        assert farewell[-2] == "polylora: stopped"
    finally:
        process.stop()
