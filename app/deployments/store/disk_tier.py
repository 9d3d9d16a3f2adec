"""The disk tier: files of remote adapters on this machine's disk, by the digest of their contents.

A download lives under `staging/` until it is complete, flushed and renamed to `objects/<digest>`, so objects are always
complete. Each process has a staging folder of its own; those of dead processes are removed at start, and objects with
missing bytes when they are read. The objects are bounded in bytes, and so are the downloads beside them; an object that
is being read stays. No caller waits for another's flush or deletion. The reader checks the digest of the contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from app.deployments.registry.tier_events import TierEvents
from app.deployments.store.bytes_bounded_cache import BytesBoundedCache
from app.deployments.store.tier_counters import TierCounters
from app.engine.config import EvictionPolicy
from app.engine.errors import SourceError

logger = logging.getLogger(__name__)

_ENTRY = "entry.json"


class DiskTier:
    """One per process; processes may share the folder. Called from any thread."""

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        policy: EvictionPolicy,
        counts: TierCounters,
        events: TierEvents,
        *,
        pinned: Collection[str] = (),
    ) -> None:
        """`events` receives each digest that is deleted, in the deleting thread. `pinned`: see `pin`."""
        self._objects, staging = root / "objects", root / "staging"
        for folder in (self._objects, staging):
            folder.mkdir(parents=True, exist_ok=True)
        self._counts = counts
        self._lock = threading.Lock()
        self._staging_changed = threading.Condition()
        self._staged_bytes: dict[Path, int] = {}  # staging folder -> bytes that its download has reserved
        self._staged_by: dict[Path, str] = {}  # staging folder -> tenant
        self._events = events
        self._cache = BytesBoundedCache(max_bytes, policy)
        self._cache.pin(pinned)
        # One process at a time, so that none finds another's staging folder before its lock file.
        with (staging / "guard").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            _remove_leftovers(staging)
            self._staging = staging / f"{os.getpid()}-{secrets.token_hex(6)}"
            # Locked until this process ends, however it ends.
            self._alive = self._staging.with_suffix(".lock").open("w")
            fcntl.flock(self._alive, fcntl.LOCK_EX)
            self._staging.mkdir()
        self._load_index()

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return self._cache.total_bytes

    @property
    def digests(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._cache)

    def pin(self, digests: Collection[str]) -> None:
        """Pin exactly these: once on disk, they are not evicted."""
        with self._lock:
            self._cache.pin(digests)

    @contextlib.contextmanager
    def reading(self, digest: str) -> Iterator[Path | None]:
        """The folder with these contents, which stays while the block runs; None if it is not here."""
        with self._lock:
            is_cached = digest in self._cache
        if is_cached and not _is_whole(self._folder(digest)):
            if self._folder(digest).is_dir():
                logger.warning("removing %s: its files are incomplete", self._folder(digest))
            self.remove(digest)  # another process may have removed the folder
        with self._lock:
            is_cached = digest in self._cache
            if is_cached:
                self._cache.record_hit(digest)
                self._cache.ref(digest)
        if not is_cached:
            self._counts.miss("disk")
            yield None
            return
        self._counts.hit("disk")
        try:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._folder(digest))  # so that the order of use survives a restart
            yield self._folder(digest)
        finally:
            with self._lock:
                self._cache.unref(digest)

    @contextlib.contextmanager
    def staging(self, tenant_id: str) -> Iterator[Path]:
        """An empty folder to download into; removed after the block unless `keep` took it. Raises SourceError."""
        folder = self._staging / secrets.token_hex(8)
        try:
            folder.mkdir()
        except OSError as error:
            raise SourceError(f"downloads cannot be written to adapters.state_dir: {error.strerror}") from error
        with self._staging_changed:
            self._staged_by[folder] = tenant_id
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            with self._staging_changed:
                self._staged_bytes.pop(folder, None)
                del self._staged_by[folder]
                self._staging_changed.notify_all()

    def reserve(self, folder: Path, num_bytes: int, wait_s: float = 0.0) -> None:
        """Reserve bytes for a download into this staging folder; waits until they fit beside the other downloads.

        All of a tenant's downloads together may use half of the limit, and a larger one is admitted alone. It counts as
        half for the other tenants, so it leaves them room. Raises SourceError after `wait_s`.
        """
        half, tenant_id = self._cache.max_bytes // 2, self._staged_by[folder]

        def fits() -> bool:
            used: Counter[str] = Counter()
            for other, num_staged in self._staged_bytes.items():
                used[self._staged_by[other]] += num_staged
            own = used.pop(tenant_id, 0)
            has_others = own > self._staged_bytes.get(folder, 0)
            own += num_bytes
            if own > half and has_others:
                return False
            others = sum(min(each, half) for each in used.values())
            return not others or others + min(own, half) <= self._cache.max_bytes

        with self._staging_changed:
            if not self._staging_changed.wait_for(fits, wait_s):
                raise SourceError(
                    f"other downloads leave no room for {num_bytes} bytes of adapters.disk_cache_bytes "
                    f"{self._cache.max_bytes}, of which one project's downloads may use half; try again later, or "
                    "raise it"
                )
            self._staged_bytes[folder] = self._staged_bytes.get(folder, 0) + num_bytes

    def keep(self, digest: str, staged: Path, load_s: float) -> bool:
        """Make a staging folder the object of this digest. False if pinned objects leave no room."""
        with self._lock:
            if digest in self._cache:
                return True
        sizes = {file.name: file.stat().st_size for file in staged.iterdir()}
        _write_entry(staged, {"files": sizes, "load_s": load_s})
        hidden: list[tuple[str, Path]] = []
        try:
            with self._lock:
                if digest in self._cache:  # by another thread, meanwhile
                    return True
                evicted = self._cache.add(digest, sum(sizes.values()), load_s)
                if evicted is None:
                    return False
                try:
                    hidden += ((old, self._hide(old)) for old in evicted)
                    self._publish(digest, staged)
                except OSError:
                    self._cache.remove(digest)
                    raise
        finally:
            for old, trash in hidden:
                self._discard(old, trash)
        _flush(self._objects)
        self._counts.record_evictions("disk", len(evicted))
        self._report()
        return True

    def remove(self, digest: str) -> None:
        with self._lock:
            trash = self._hide(digest) if self._cache.remove(digest) else None
        if trash is not None:
            self._discard(digest, trash)
        self._report()

    def close(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        Path(self._alive.name).unlink(missing_ok=True)
        self._alive.close()

    def _folder(self, digest: str) -> Path:
        return self._objects / digest

    def _publish(self, digest: str, staged: Path) -> None:
        try:
            staged.rename(self._folder(digest))
        except OSError:
            if not self._folder(digest).is_dir():
                raise
            # Another process has published the same contents.

    def _hide(self, digest: str) -> Path:
        """Move an object to staging before deleting it: a crash in between leaves no half object."""
        trash = self._staging / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            self._folder(digest).rename(trash)
        return trash

    def _discard(self, digest: str, trash: Path) -> None:
        shutil.rmtree(trash, ignore_errors=True)
        self._events.on_move("deleted from disk", digest)

    def _load_index(self) -> None:
        found = []
        with os.scandir(self._objects) as folders:
            for folder in folders:
                entry = _read_entry(folder.path)
                if entry is None:
                    logger.warning("removing %s: its entry cannot be read", folder.path)
                    self._discard(folder.name, self._hide(folder.name))
                else:
                    found.append((folder.stat().st_mtime, folder.name, sum(entry.files.values()), entry.load_s))
        for _, digest, size_bytes, load_s in sorted(found):
            evicted = self._cache.add(digest, size_bytes, load_s)
            for old in [digest] if evicted is None else evicted:
                self._discard(old, self._hide(old))
        self._report()

    def _report(self) -> None:
        with self._lock:
            size_bytes, number, limit_bytes = self._cache.total_bytes, len(self._cache), self._cache.max_bytes
        self._counts.set_size("disk", size_bytes, number, limit_bytes)


class _Entry(NamedTuple):
    """The file `entry.json` of an object: the sizes of its files in bytes, and the seconds it took to load them."""

    files: dict[str, int]
    load_s: float


def _read_entry(folder: str | Path) -> _Entry | None:
    """None if it is missing or malformed."""
    try:
        with open(f"{folder}/{_ENTRY}", "rb", buffering=0) as file:
            entry = json.loads(file.read())
        return _Entry({str(name): int(size) for name, size in entry["files"].items()}, float(entry["load_s"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_whole(folder: Path) -> bool:
    """Whether every file is there with its full size."""
    entry = _read_entry(folder)
    try:
        return entry is not None and all((folder / name).stat().st_size == size for name, size in entry.files.items())
    except OSError:
        return False


def _remove_leftovers(staging: Path) -> None:
    """Remove the staging folders of dead processes: their lock is free. The caller holds the guard."""
    for lock in {path.with_suffix(".lock") for path in staging.iterdir() if path.name != "guard"}:
        with lock.open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)


def _write_entry(staged: Path, entry: dict[str, object]) -> None:
    """Write the entry beside the files and flush all of them."""
    (staged / _ENTRY).write_text(json.dumps(entry))
    for file in staged.iterdir():
        _flush(file)
    _flush(staged)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
