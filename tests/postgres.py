"""A private PostgreSQL server in a temporary folder, where its programs are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psycopg


def find_postgres() -> Path | None:
    """The folder of `initdb` and `postgres`: on the path, or where Debian puts them."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: folder.parent.name, reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class PostgresServer:
    """Listens on a Unix socket only; nothing of it outlives `stop`."""

    def __init__(self, programs: Path, copy_of: PostgresServer | None = None) -> None:
        """copy_of: the server whose standby this one is, until it is promoted."""
        self.folder = Path(tempfile.mkdtemp(prefix="plp", dir="/tmp"))  # a socket's path must be short
        self._as_user: list[str] = []
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            # Not Popen's `user`: it forks this process, in whose child gRPC's fork handlers may fail.
            user = _unprivileged_user()
            shutil.chown(self.folder, user)
            self._as_user = ["setpriv", f"--reuid={user}", "--clear-groups", "--"]
        data = self.folder / "data"
        if copy_of is None:
            self._run(
                programs / "initdb", "-D", data, "-A", "trust", "-U", "polylora", "--no-locale", "-E", "UTF8", "-N"
            )
        else:
            self._run(
                programs / "pg_basebackup", "-D", data, "-R", "-c", "fast", "-h", copy_of.folder, "-U", "polylora"
            )
        self._programs, self._data = programs, data
        self._process = self._started()
        self._wait(600)

    def new_database(self) -> str:
        """An empty database's URL."""
        name = f"t{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}")
        return f"postgresql://polylora@/{name}?host={self.folder}"

    def kill(self) -> None:
        """All of its processes at once, as when its machine loses power; `start` has it come back with what it had."""
        children = self._children()
        self.send(signal.SIGKILL)
        self._process.wait(60)
        deadline_s = time.monotonic() + 60
        while any(map(_is_running, children)):  # another server does not use memory that one of them still has
            assert time.monotonic() < deadline_s, children
            time.sleep(0.01)

    def start(self) -> None:
        """After `kill`; returns when it answers."""
        self._process = self._started()
        self._wait(600)

    def execute(self, statement: str) -> None:
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())

    def send(self, number: signal.Signals) -> None:
        """To every process of the server."""
        for pid in (self._process.pid, *self._children()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _children(self) -> list[int]:
        pid = self._process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(300)
        shutil.rmtree(self.folder)

    def _started(self) -> subprocess.Popen[bytes]:
        options = ["-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "max_connections=30"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [
                    *self._as_user,
                    self._programs / "postgres",
                    "-D",
                    self._data,
                    "-k",
                    self.folder,
                    "-c",
                    "listen_addresses=",
                    *options,
                ],
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def _address(self, database: str) -> str:
        return f"host={self.folder} user=polylora dbname={database}"

    def _wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                psycopg.connect(self._address("postgres")).close()
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline_s, (self.folder / "log").read_text()
                time.sleep(0.05)
            else:
                return

    def _run(self, *command: object) -> None:
        words = [*self._as_user, *(str(part) for part in command)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=self.folder)
        assert done.returncode == 0, done.stderr


def _unprivileged_user() -> str:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
