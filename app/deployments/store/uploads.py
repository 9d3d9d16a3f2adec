"""Uploaded adapters, stored in the state folder under the digest of their files.

Their source is `upload://<digest>`, which is read like a folder under the roots. An upload is written to a temporary
folder, flushed and renamed, so what has a digest for a name is complete. An upload without references for `GRACE_S` is
removed, unless it is being loaded; the grace is for requests that began with an older generation. Called from any
thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from app.deployments.registry.models import UPLOADED
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.errors import AdapterTooLarge, QueueFull

logger = logging.getLogger(__name__)

#: How long an unreferenced upload stays.
GRACE_S = 900.0
_PART = ".part"


class Uploads:
    """One folder of one process. `clock` gives monotonic seconds; `max_bytes` limits all uploads together."""

    def __init__(self, root: Path, max_bytes: int, clock: Callable[[], float]) -> None:
        self.root = root
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._loading: Counter[str] = Counter()  # digests that are being loaded, with their number of loads
        self._unreferenced_s: dict[str, float] = {}  # digest -> when it was first seen unreferenced
        root.mkdir(parents=True, exist_ok=True)
        for partial in root.glob(f"*{_PART}"):  # of a process that ended while it wrote
            shutil.rmtree(partial)
        self._size_bytes = {folder.name: _size_bytes(folder) for folder in root.iterdir()}

    @contextlib.contextmanager
    def store(self, config: bytes, weights: bytes) -> Iterator[str]:
        """The source of these files, which stay while the block runs.

        Raises AdapterTooLarge for files that can never fit, QueueFull while other uploads leave no room.
        """
        digest = hashlib.sha256(b"%d\n%b" % (len(config), config) + hashlib.sha256(weights).digest()).hexdigest()
        size_bytes = len(config) + len(weights)
        with self._lock:
            self._loading[digest] += 1
        try:
            with self._lock:
                self._reserve(digest, size_bytes)
            if not (self.root / digest).is_dir():
                self._write(digest, config, weights)
            yield UPLOADED + digest
        finally:
            with self._lock:
                self._loading[digest] -= 1
                if not self._loading[digest]:
                    del self._loading[digest]

    def sweep(self, referenced: Collection[str]) -> int:
        """Remove uploads that were unreferenced for `GRACE_S`; returns their number. `referenced`: sources in use."""
        now_s = self._clock()
        with self._lock:
            unreferenced = [digest for digest in self._size_bytes if UPLOADED + digest not in referenced]
            unreferenced = [digest for digest in unreferenced if digest not in self._loading]
            self._unreferenced_s = {digest: self._unreferenced_s.get(digest, now_s) for digest in unreferenced}
            expired = [digest for digest, since_s in self._unreferenced_s.items() if now_s - since_s >= GRACE_S]
            for digest in expired:
                self._remove(digest)
        return len(expired)

    def _reserve(self, digest: str, size_bytes: int) -> None:
        """Make room for an upload, removing the longest unreferenced ones first."""
        if digest in self._size_bytes:
            return
        if size_bytes > self._max_bytes:
            raise AdapterTooLarge(
                f"the adapter has {size_bytes} bytes but all uploads together may have {self._max_bytes}"
            )
        for unreferenced in sorted(self._unreferenced_s, key=self._unreferenced_s.__getitem__):
            if sum(self._size_bytes.values()) + size_bytes <= self._max_bytes:
                break
            if unreferenced not in self._loading:
                self._remove(unreferenced)
        if sum(self._size_bytes.values()) + size_bytes > self._max_bytes:
            raise QueueFull(
                f"uploaded adapters leave no room for {size_bytes} bytes more of adapters.disk_cache_bytes "
                f"{self._max_bytes}; unload some, or raise it",
                retry_after_s=30,
            )
        self._size_bytes[digest] = size_bytes

    def _write(self, digest: str, config: bytes, weights: bytes) -> None:
        part = self.root / f"{digest}-{secrets.token_hex(6)}{_PART}"
        try:
            part.mkdir()
            for name, content in ((CONFIG_NAME, config), (WEIGHTS_NAME, weights)):
                with (part / name).open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            with contextlib.suppress(OSError):  # another call has written the same files
                part.rename(self.root / digest)
        except OSError as error:  # a full disk
            logger.error("an uploaded adapter cannot be written: %s", error)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        if not (self.root / digest).is_dir():
            with self._lock:
                if self._loading[digest] == 1:  # no other call writes the same files
                    self._size_bytes.pop(digest, None)
            raise QueueFull(
                "the adapter could not be written to adapters.state_dir; free disk space and try again", retry_after_s=5
            )

    def _remove(self, digest: str) -> None:
        shutil.rmtree(self.root / digest, ignore_errors=True)
        del self._size_bytes[digest]
        self._unreferenced_s.pop(digest, None)


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
