"""A web server of adapters that can hang: connections are accepted then, and answered only afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self


class Hub(ThreadingHTTPServer):
    """A server on its own port and threads, while it is entered."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
        self.answers = threading.Event()
        self.answers.set()
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.answers.set()
        self.shutdown()
        self.server_close()


class _Files(SimpleHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._wait(super().do_GET)

    def do_HEAD(self) -> None:
        self._wait(super().do_HEAD)

    def _wait(self, answer: Callable[[], None]) -> None:
        self.server.answers.wait()
        try:
            answer()
        except ConnectionError:  # the client has been killed meanwhile
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Drop the log."""
