"""A fetcher that ends, whatever the source does.

In: any `Fetcher` and a number of seconds. Out: its answer, or a `SourceError` when the time is up. Libraries wait where
no argument reaches (name servers, credentials, an operator's own code), and a thread cannot be stopped: the
caller goes on, the thread is left behind, and a host, bucket or organisation that has left too many of them behind
is not asked again before one ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, wait
from pathlib import Path

from app.deployments.store.sources.places import Fetcher, lane_of
from app.engine.errors import SourceError

#: Threads of one host, bucket or organisation whose time was up and that have not ended.
MAX_HANGING = 16


class TimedFetcher:
    """`sources.places.Fetcher`. Called from any thread."""

    def __init__(self, fetcher: Fetcher, timeout_s: float) -> None:
        self._fetcher = fetcher
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._hanging: Counter[str] = Counter()

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
        answer: Future[str] = Future()
        threading.Thread(target=self._run, args=(answer, uri, folder), name="adapter-source", daemon=True).start()
        if not wait([answer], self._timeout_s).done:
            with self._lock:
                self._hanging[lane] += 1
            answer.add_done_callback(lambda _: self._has_ended(lane))
            raise SourceError(f"{uri} was not there within adapters.source_timeout_s {self._timeout_s:g}")
        return answer.result()

    def _run(self, answer: Future[str], uri: str, folder: Path) -> None:
        try:
            answer.set_result(self._fetcher.fetch(uri, folder))
        except BaseException as error:  # the caller's, if it still waits
            answer.set_exception(error)

    def _has_ended(self, lane: str) -> None:
        with self._lock:
            self._hanging[lane] -= 1
