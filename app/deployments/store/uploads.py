"""Uploaded adapters, stored in the state folder under the digest of their files.

Their source is `upload://<digest>`, which is read like a folder under the roots. An upload arrives in parts in a
temporary folder, which is flushed and renamed, so what has a digest for a name is complete. An upload without
references for `GRACE_S` is removed, unless it is being loaded; the grace is for requests that began with an older
generation. One without a new part for `ARRIVAL_S` is discarded. With a database that other machines reach, uploads
have copies in it, and the folder is a cache of those. Called from any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from app.deployments.registry.models import UPLOADED
from app.deployments.store.upload_copies import UploadCopies
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.errors import AdapterTooLarge, NotReady, QueueFull

logger = logging.getLogger(__name__)

#: How long an unreferenced upload stays.
GRACE_S = 900.0
#: How long an upload may wait for its next part.
ARRIVAL_S = 300.0
_PART = ".part"


class _Arriving:
    """An upload whose parts arrive in `folder`."""

    def __init__(self, folder: Path, tenant_id: str, size_bytes: int, now_s: float) -> None:
        self.folder, self.tenant_id = folder, tenant_id
        self.size_bytes = size_bytes
        self.used_s = now_s


class Uploads:
    """One process's; those of services that share a registry on one machine share the folder. `clock` gives monotonic
    seconds; `max_bytes` limits the uploads that this process knows together."""

    def __init__(
        self, root: Path, max_bytes: int, clock: Callable[[], float], copies: UploadCopies | None = None
    ) -> None:
        self.root = root
        self._copies = copies
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._arriving: dict[str, _Arriving] = {}  # by upload id
        self._loading: Counter[str] = Counter()  # digests that are being loaded, with their number of loads
        self._unreferenced_s: dict[str, float] = {}  # digest -> when it was first seen unreferenced
        root.mkdir(parents=True, exist_ok=True)
        self._size_bytes = {folder.name: _size_bytes(folder) for folder in root.iterdir() if folder.suffix != _PART}

    def begin(self, config: bytes, tenant_id: str) -> str:
        """Start an upload with its adapter_config.json; its id. Raises AdapterTooLarge, QueueFull."""
        upload_id = secrets.token_hex(16)
        upload = _Arriving(self.root / f"{upload_id}{_PART}", tenant_id, 0, self._clock())
        with self._lock:
            self._reserve(upload, len(config))
            self._arriving[upload_id] = upload
        with self._disk_errors(upload_id):
            upload.folder.mkdir()
            (upload.folder / CONFIG_NAME).write_bytes(config)
            (upload.folder / WEIGHTS_NAME).touch()
        return upload_id

    def write(self, upload_id: str, offset: int, part: bytes) -> None:
        """Write a part of the weights; writing it twice changes nothing.

        Raises AdapterTooLarge for what can never fit, QueueFull while other uploads leave no room, and NotReady if the
        upload was discarded.
        """
        with self._lock:
            upload = self._upload(upload_id)
            upload.used_s = self._clock()
            config_bytes = (upload.folder / CONFIG_NAME).stat().st_size
            self._reserve(upload, max(0, config_bytes + offset + len(part) - upload.size_bytes))
        with self._disk_errors(upload_id), (upload.folder / WEIGHTS_NAME).open("r+b") as file:
            file.seek(offset)
            file.write(part)

    @contextlib.contextmanager
    def end(self, upload_id: str) -> Iterator[str]:
        """The source of a complete upload, whose files stay while the block runs. Raises NotReady, QueueFull."""
        with self._lock:
            upload = self._upload(upload_id)
        with self._disk_errors(upload_id):
            digest = _digest(upload.folder)
        with self._lock:
            self._loading[digest] += 1
        try:
            with self._disk_errors(upload_id):
                for name in (CONFIG_NAME, WEIGHTS_NAME):
                    with (upload.folder / name).open("rb") as file:
                        os.fsync(file.fileno())
                with self._lock:
                    self._publish(upload.folder, digest)
                    self._size_bytes[digest] = upload.size_bytes
                    self._unreferenced_s.pop(digest, None)  # it is about to be named again
                if self._copies is not None:
                    self._copies.add(digest, self.root / digest)
            self.discard(upload_id)
            yield UPLOADED + digest
        finally:
            with self._lock:
                self._loading[digest] -= 1
                if not self._loading[digest]:
                    del self._loading[digest]

    def folder(self, digest: str) -> Path | None:
        """The files of an upload, restored from their copy if they are not here; None if there is none.

        Raises NotReady if the copy cannot be read or written here.
        """
        path = self.root / digest
        if not path.is_dir() and self._copies is not None:
            self._restore(digest, self._copies)
        return path if path.is_dir() else None

    def discard(self, upload_id: str) -> None:
        """Remove an upload that has not ended; no effect on others."""
        with self._lock:
            upload = self._arriving.pop(upload_id, None)
        if upload is not None:
            shutil.rmtree(upload.folder, ignore_errors=True)

    def sweep(self, referenced: Collection[str]) -> int:
        """Remove uploads that were unreferenced for `GRACE_S`, and copy those that are not copied yet; returns how many
        were removed. `referenced`: sources in use. Raises NotReady.
        """
        now_s = self._clock()
        copied = frozenset[str]() if self._copies is None else self._copies.digests()
        with self._lock:
            late = [upload_id for upload_id, each in self._arriving.items() if now_s - each.used_s >= ARRIVAL_S]
            own = {each.folder for each in self._arriving.values()}
        for upload_id in late:
            self.discard(upload_id)
        for folder in self.root.glob(f"*{_PART}"):
            if folder not in own and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            known = self._size_bytes.keys() | copied
            unreferenced = [digest for digest in known if UPLOADED + digest not in referenced]
            unreferenced = [digest for digest in unreferenced if digest not in self._loading]
            self._unreferenced_s = {digest: self._unreferenced_s.get(digest, now_s) for digest in unreferenced}
            expired = [digest for digest, since_s in self._unreferenced_s.items() if now_s - since_s >= GRACE_S]
            for digest in expired:
                self._remove(digest)
            missing = [digest for digest in self._size_bytes.keys() - copied if UPLOADED + digest in referenced]
        if self._copies is not None:
            for digest in copied.intersection(expired):
                self._copies.remove(digest)
            for digest in missing:  # of a release that made no copies
                self._copies.add(digest, self.root / digest)
        return len(expired)

    def _upload(self, upload_id: str) -> _Arriving:
        """Raises NotReady. The caller holds the lock."""
        upload = self._arriving.get(upload_id)
        if upload is None:
            raise NotReady("the upload was interrupted; send the adapter again")
        return upload

    def _reserve(self, upload: _Arriving, num_bytes: int) -> None:
        """Make room for more bytes of an upload, removing the longest unreferenced ones first. The caller holds the
        lock.

        Uploads of one tenant that arrive at a time may take half of the room.
        """
        if upload.size_bytes + num_bytes > self._max_bytes:
            raise AdapterTooLarge(
                f"the adapter has {upload.size_bytes + num_bytes} bytes or more but all uploads together may have "
                f"{self._max_bytes}"
            )
        own = sum(each.size_bytes for each in self._arriving.values() if each.tenant_id == upload.tenant_id)
        is_alone = own == upload.size_bytes
        for unreferenced in sorted(self._unreferenced_s, key=self._unreferenced_s.__getitem__):
            if self._used_bytes + num_bytes <= self._max_bytes:
                break
            if unreferenced not in self._loading:
                self._remove(unreferenced)
        if self._used_bytes + num_bytes > self._max_bytes or (not is_alone and 2 * (own + num_bytes) > self._max_bytes):
            raise QueueFull(
                f"uploaded adapters leave no room for {num_bytes} bytes more of adapters.disk_cache_bytes "
                f"{self._max_bytes}; unload some, or raise it",
                retry_after_s=30,
            )
        upload.size_bytes += num_bytes

    @property
    def _used_bytes(self) -> int:
        return sum(self._size_bytes.values()) + sum(each.size_bytes for each in self._arriving.values())

    @contextlib.contextmanager
    def _disk_errors(self, upload_id: str) -> Iterator[None]:
        """Discard the upload if the disk is full or can only be read. Raises QueueFull."""
        try:
            yield
        except OSError as error:
            logger.error("an uploaded adapter cannot be written: %s", error)
            self.discard(upload_id)
            raise QueueFull(
                f"the adapter could not be written to adapters.state_dir ({error.strerror}); "
                "once the disk takes files again, send the adapter again",
                retry_after_s=5,
            ) from error

    def _restore(self, digest: str, copies: UploadCopies) -> None:
        arriving = self.root / f"{secrets.token_hex(16)}{_PART}"
        try:
            arriving.mkdir()
            if copies.restore(digest, arriving) and _digest(arriving) == digest:
                with self._lock:
                    self._size_bytes[digest] = _size_bytes(arriving)
                    self._publish(arriving, digest)
        except OSError as error:
            raise NotReady(
                f"an uploaded adapter cannot be written to adapters.state_dir ({error.strerror})", retry_after_s=5
            ) from error
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    def _publish(self, arrived: Path, digest: str) -> None:
        try:
            arrived.rename(self.root / digest)
        except OSError:  # the same files came before, perhaps through another service
            if not (self.root / digest).is_dir():
                raise

    def _remove(self, digest: str) -> None:
        shutil.rmtree(self.root / digest, ignore_errors=True)
        self._size_bytes.pop(digest, None)
        self._unreferenced_s.pop(digest, None)


def _digest(folder: Path) -> str:
    """Hex SHA-256 of an upload's two files; where the first one ends is part of it."""
    config = (folder / CONFIG_NAME).read_bytes()
    with (folder / WEIGHTS_NAME).open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").digest()
    return hashlib.sha256(b"%d\n%b" % (len(config), config) + weights).hexdigest()


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _is_abandoned(partial: Path) -> bool:
    """Whether no part has arrived for `ARRIVAL_S`: its process has ended, for every process discards its own."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - max(file.stat().st_mtime for file in (partial, *partial.iterdir())) >= ARRIVAL_S
    return False
