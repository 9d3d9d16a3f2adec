"""A fetcher that ends, whatever the source does.

In: any `Fetcher` and a number of seconds. Out: its answer, or a `SourceError` when the time is up. Libraries wait where
no argument reaches (name servers, credentials, an operator's own code), and a thread cannot be stopped: the caller goes
on, the thread is left behind, and a host, bucket or organisation that has left too many of them behind is not asked
again before one ends. It is the same when nobody wants the answer any more (`abandon`). Rule: a thread that was left
behind removes what it has fetched.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from app.deployments.store.sources.source_resolution import Fetcher, lane_of
from app.engine.errors import SourceError

#: Threads of one host, bucket or organisation whose time was up and that have not ended.
MAX_HANGING = 16


class FetchTimeout:
    """`sources.places.Fetcher`. Called from any thread."""

    def __init__(self, fetcher: Fetcher, timeout_s: float) -> None:
        self._fetcher = fetcher
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._hanging: Counter[str] = Counter()
        self._unwanted: dict[str, list[Future[None]]] = {}  # of fetches under way: done when nobody wants them

    def accepts(self, uri: str) -> bool:
        return self._fetcher.accepts(uri)

    def fetch(self, uri: str, folder: Path) -> str:
        """Raises SourceError, and whatever the fetcher raises."""
        lane = lane_of(uri)
        with self._lock:
            if self._hanging[lane] >= MAX_HANGING:
                raise SourceError(
                    f"{lane} is not asked for {uri}: {MAX_HANGING} earlier fetches from there have not ended"
                )
            self._unwanted.setdefault(uri, []).append(unwanted := Future[None]())
        answer: Future[str] = Future()
        threading.Thread(target=self._run, args=(answer, uri, folder), name="adapter-source", daemon=True).start()
        either: list[Future[Any]] = [answer, unwanted]
        done = wait(either, self._timeout_s, return_when=FIRST_COMPLETED).done
        with self._lock:
            self._unwanted[uri].remove(unwanted)
            if not self._unwanted[uri]:
                del self._unwanted[uri]
            if answer not in done:
                self._hanging[lane] += 1
        if answer in done:
            return answer.result()
        answer.add_done_callback(lambda _: self._has_ended(lane, folder))
        if unwanted in done:
            raise SourceError(f"{uri} was not waited for any longer")
        raise SourceError(f"{uri} was not there within adapters.source_timeout_s {self._timeout_s:g}")

    def abandon(self, uri: str) -> None:
        """Nobody wants this any more: fetches of it that are under way end with SourceError."""
        with self._lock:
            for unwanted in self._unwanted.get(uri, ()):
                if not unwanted.done():
                    unwanted.set_result(None)

    def _run(self, answer: Future[str], uri: str, folder: Path) -> None:
        try:
            answer.set_result(self._fetcher.fetch(uri, folder))
        except BaseException as error:  # the caller's, if it still waits
            answer.set_exception(error)

    def _has_ended(self, lane: str, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # the caller removed it; some libraries make it again
        with self._lock:
            self._hanging[lane] -= 1
