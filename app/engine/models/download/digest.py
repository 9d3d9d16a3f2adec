"""SHA-256 of large files, cached in a sidecar file so that a restart does not read them again.

A cached digest counts only while the file's size, modification time and inode are unchanged. If the folder is not
writable, each start hashes again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

_LOGGER = logging.getLogger(__name__)
_DOMAIN = b"polylora/base-model/1\0"


def file_sha256(path: Path) -> str:
    """SHA-256 of one file's bytes; OSError if it cannot be read."""
    identity = _identity(path)
    sidecar = _sidecar_path(path)
    cached = _read_sidecar(sidecar)
    if cached is not None and cached.get("identity") == identity:
        digest = cached.get("sha256")
        if isinstance(digest, str) and len(digest) == 64:
            return digest
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if _identity(path) == identity:
        _write_sidecar(sidecar, {"identity": identity, "sha256": digest})
    return digest


def base_digest(parts: Iterable[tuple[str, str]]) -> str:
    """One digest over (part name, hexadecimal SHA-256) pairs in order, with its own domain tag."""
    total = hashlib.sha256(_DOMAIN)
    for name, digest in parts:
        encoded = name.encode()
        total.update(len(encoded).to_bytes(8, "little") + encoded + bytes.fromhex(digest))
    return total.hexdigest()


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _sidecar_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.sha256.json")


def _read_sidecar(sidecar: Path) -> dict[str, object] | None:
    try:
        content = json.loads(sidecar.read_text())
    except (OSError, ValueError):
        return None  # missing or damaged: compute it
    return content if isinstance(content, dict) else None


def _write_sidecar(sidecar: Path, content: dict[str, object]) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=sidecar.parent, prefix=sidecar.name)
    except OSError as error:
        _LOGGER.info("cannot cache the checksum in %s: %s", sidecar.name, error)
        return
    with os.fdopen(handle, "w") as stream:
        json.dump(content, stream)
    os.replace(temporary, sidecar)
