"""A private PostgreSQL server in a temporary folder, where its programs are installed."""

from __future__ import annotations

import getpass
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
        # It refuses to run as root, and a socket's path must be short.
        self._user = _unprivileged_user()
        self.folder = Path(tempfile.mkdtemp(prefix="plp", dir="/tmp"))
        if os.geteuid() == 0:
            shutil.chown(self.folder, self._user)
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
        self.send(signal.SIGKILL)
        self._process.wait(60)

    def start(self) -> None:
        """After `kill`; returns when it answers."""
        self._process = self._started()
        self._wait(600)

    def execute(self, statement: str) -> None:
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())

    def send(self, number: signal.Signals) -> None:
        """To every process of the server."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in (self._process.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(300)
        shutil.rmtree(self.folder)

    def _started(self) -> subprocess.Popen[bytes]:
        options = ["-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "max_connections=30"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [
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
                user=self._user if os.geteuid() == 0 else None,
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
        user = self._user if os.geteuid() == 0 else None
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, user=user, cwd=self.folder
        )
        assert done.returncode == 0, done.stderr


def _unprivileged_user() -> str:
    if os.geteuid() != 0:
        return getpass.getuser()
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
