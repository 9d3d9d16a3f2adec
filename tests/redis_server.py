"""A private Redis server, where `redis-server` is installed: it keeps what Ray's head must find when it returns."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from load_tests.service import free_port


def find_redis() -> str | None:
    """The program `redis-server`."""
    return shutil.which("redis-server")


class RedisServer:
    """Listens on loopback; it keeps everything in memory, and nothing of it outlives `stop`."""

    def __init__(self, program: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="plr", dir="/tmp"))
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        options = {"--port": str(port), "--bind": "127.0.0.1", "--save": "", "--dir": str(self._folder)}
        command = [program, *(word for option in options.items() for word in option)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)
