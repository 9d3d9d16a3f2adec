"""A timeout for fetchers, whatever the source does.

Libraries wait where no argument reaches (name servers, credentials, an operator's own code), and a thread cannot be
stopped. On a timeout, or when no caller needs the fetch any more (`abandon`), the caller continues and the thread stays
behind; it removes what it has fetched when it ends. A host, bucket or organisation with too many such threads is
refused until one ends.
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

#: Abandoned threads of one host, bucket or organisation that may still run.
MAX_HANGING = 16


class FetchTimeout:
    """A `Fetcher`. Called from any thread."""

    def __init__(self, fetcher: Fetcher, timeout_s: float) -> None:
        self._fetcher = fetcher
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._hanging: Counter[str] = Counter()
        self._unwanted: dict[str, list[Future[None]]] = {}  # URI -> one per running fetch, done by `abandon`

    def accepts(self, uri: str) -> bool:
        return self._fetcher.accepts(uri)

    def fetch(self, uri: str, folder: Path, tenant_id: str) -> str:
        """Raises SourceError, and whatever the fetcher raises."""
        lane = lane_of(uri)
        with self._lock:
            if self._hanging[lane] >= MAX_HANGING:
                raise SourceError(
                    f"{uri} is not fetched: {MAX_HANGING} earlier fetches from {lane} still hang; try again later"
                )
            self._unwanted.setdefault(uri, []).append(unwanted := Future[None]())
        answer: Future[str] = Future()
        run = (answer, uri, folder, tenant_id)
        threading.Thread(target=self._run, args=run, name="adapter-source", daemon=True).start()
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
            raise SourceError(f"the fetch of {uri} was abandoned: no request waits for it")
        raise SourceError(f"{uri} was not fetched within adapters.source_timeout_s {self._timeout_s:g}")

    def abandon(self, uri: str) -> None:
        """End running fetches of this URI with SourceError: no caller needs them."""
        with self._lock:
            for unwanted in self._unwanted.get(uri, ()):
                if not unwanted.done():
                    unwanted.set_result(None)

    def _run(self, answer: Future[str], uri: str, folder: Path, tenant_id: str) -> None:
        try:
            answer.set_result(self._fetcher.fetch(uri, folder, tenant_id))
        except BaseException as error:  # raised by the caller if it still waits
            answer.set_exception(error)

    def _has_ended(self, lane: str, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # the caller removed it; some libraries create it again
        with self._lock:
            self._hanging[lane] -= 1
