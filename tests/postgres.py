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

    def __init__(self, programs: Path) -> None:
        # It refuses to run as root, and a socket's path must be short.
        self._user = _unprivileged_user()
        self._folder = Path(tempfile.mkdtemp(prefix="plp", dir="/tmp"))
        if os.geteuid() == 0:
            shutil.chown(self._folder, self._user)
        data = self._folder / "data"
        self._run(programs / "initdb", "-D", data, "-A", "trust", "-U", "polylora", "--no-locale", "-E", "UTF8", "-N")
        log = (self._folder / "log").open("wb")
        options = ["-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "max_connections=30"]
        self._process = subprocess.Popen(
            [programs / "postgres", "-D", data, "-k", self._folder, "-c", "listen_addresses=", *options],
            stdout=log,
            stderr=log,
            user=self._user if os.geteuid() == 0 else None,
            cwd=self._folder,
        )
        log.close()
        self._wait(600)

    def new_database(self) -> str:
        """An empty database's URL."""
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql://polylora@/{name}?host={self._folder}"

    def stop(self) -> None:
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(300)
        shutil.rmtree(self._folder)

    def _address(self, database: str) -> str:
        return f"host={self._folder} user=polylora dbname={database}"

    def _wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                psycopg.connect(self._address("postgres")).close()
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < deadline_s, (self._folder / "log").read_text()
                time.sleep(0.05)
            else:
                return

    def _run(self, *command: object) -> None:
        user = self._user if os.geteuid() == 0 else None
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, user=user, cwd=self._folder
        )
        assert done.returncode == 0, done.stderr


def _unprivileged_user() -> str:
    if os.geteuid() != 0:
        return getpass.getuser()
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
