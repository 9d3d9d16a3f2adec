"""Time limits for calls that may hang: fetchers, and the file systems of local folders.

Libraries wait where no argument reaches (name servers, credentials, an operator's own code, a file server that is
gone), and a thread cannot be stopped. On a timeout, or when no caller needs the fetch any more (`abandon`), the caller
continues and the thread stays behind; it removes what it has fetched when it ends. A host, bucket or organisation, or
for local folders a project, with too many such threads is refused until one ends.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from app.deployments.rpc.background_tasks import call_in_daemon_thread
from app.deployments.store.sources.source_resolution import Fetcher, lane_of
from app.engine.errors import FetchAbandoned, SourceError

R = TypeVar("R")

#: Abandoned threads that may still run: of one host, bucket, organisation or project.
MAX_HANGING = 16
#: The same of all together; beyond it, each may have one.
MAX_ALL_HANGING = 256


class FetchTimeout:
    """A `Fetcher`. Called from any thread."""

    def __init__(self, fetcher: Fetcher, timeout_s: float) -> None:
        self._fetcher = fetcher
        self._timeout_s = timeout_s
        self._hanging_calls = _HangingCalls()
        self._lock = threading.Lock()
        self._unwanted: dict[str, list[Future[None]]] = {}  # URI -> one per running fetch, done by `abandon`

    def accepts(self, uri: str) -> bool:
        return self._fetcher.accepts(uri)

    def fetch(self, uri: str, folder: Path, tenant_id: str) -> str:
        """Raises SourceError, and whatever the fetcher raises."""
        lane = lane_of(uri)
        if num_hanging := self._hanging_calls.num_at_limit(lane):
            raise SourceError(
                f"{uri} is not fetched: {num_hanging} earlier fetches from {lane} still hang; try again later"
            )
        unwanted = Future[None]()
        with self._lock:
            self._unwanted.setdefault(uri, []).append(unwanted)
        answer = call_in_daemon_thread(lambda: self._fetcher.fetch(uri, folder, tenant_id))
        either: list[Future[Any]] = [answer, unwanted]
        done = wait(either, self._timeout_s, return_when=FIRST_COMPLETED).done
        with self._lock:
            self._unwanted[uri].remove(unwanted)
            if not self._unwanted[uri]:
                del self._unwanted[uri]
        if answer in done:
            return answer.result()
        # The caller removes the folder, and some libraries create it again.
        answer.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))
        self._hanging_calls.leave(lane, answer)
        if unwanted in done:
            raise FetchAbandoned(f"the fetch of {uri} was abandoned: no request waits for it")
        raise SourceError(f"{uri} was not fetched within adapters.source_timeout_s {self._timeout_s:g}")

    def abandon(self, uri: str) -> None:
        """End running fetches of this URI with FetchAbandoned: no caller needs them."""
        with self._lock:
            for unwanted in self._unwanted.get(uri, ()):
                if not unwanted.done():
                    unwanted.set_result(None)


class FolderTimeout:
    """A timeout for what looks at local folders, which may be on a network file system. Called from any thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._hanging_calls = _HangingCalls()

    def call(self, source: str, tenant_id: str, work: Callable[[], R], more_s: float = 0.0) -> R:
        """The result of `work` for this source, which may take `more_s` beside what the file system takes.

        Raises SourceError, and whatever `work` raises.
        """
        if num_hanging := self._hanging_calls.num_at_limit(tenant_id):
            raise SourceError(
                f"{source} is not read: {num_hanging} earlier reads of this project's local folders still hang; "
                "try again later"
            )
        answer = call_in_daemon_thread(work)
        if answer not in wait([answer], self._timeout_s + more_s).done:
            self._hanging_calls.leave(tenant_id, answer)
            raise SourceError(
                f"{source} was not read within adapters.source_timeout_s {self._timeout_s:g}: its file system hangs"
            )
        return answer.result()


class _HangingCalls:
    """How many of an owner's calls were left in their threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hanging: Counter[str] = Counter()

    def num_at_limit(self, owner: str) -> int:
        """The number of this owner's hanging calls if it may start no other, else 0."""
        with self._lock:
            num_hanging = self._hanging[owner]
            most = MAX_HANGING if self._hanging.total() < MAX_ALL_HANGING else 1
            return num_hanging if num_hanging >= most else 0

    def leave(self, owner: str, answer: Future[Any]) -> None:
        """The caller does not wait any longer: count this call until it ends."""
        with self._lock:
            self._hanging[owner] += 1
        answer.add_done_callback(partial(self._end, owner))

    def _end(self, owner: str, _: Future[Any]) -> None:
        with self._lock:
            self._hanging[owner] -= 1
            if not self._hanging[owner]:
                del self._hanging[owner]
