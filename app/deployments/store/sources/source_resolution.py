"""Resolving a source: from its text to a local folder or a download.

A source is a path under the configured roots (`LocalSource`) or a URI that a fetcher accepts (`RemoteSource`); anything
else is UnsafeSource. A download is two plain files of known names, or one card: links, folders and other files are
refused or removed, and no archive is unpacked but a registry's layers (`oci`). The reader checks the contents.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from app.deployments.registry.models import DEFAULT_TENANT, UPLOADED
from app.engine.adapters.adapter_tokenizer import TEXT_FILES
from app.engine.adapters.formats.arrow import CARD_SUFFIX
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.adapters.paths import resolve_adapter_path
from app.engine.adapters.signing.trusted_keys import SIGNATURE_NAME, SIGNATURE_SUFFIX
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, NotFound, UnsafeSource

#: scheme://authority/path without user names, queries, fragments, escapes, control characters or chains.
_PLAIN_URI = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,31})://(?P<host>[\w.:-]{1,255})(?P<path>/[\w./@+=~ -]{0,2000})?", re.ASCII
)
#: oci://registry/repository:tag, or with @ and the digest of a manifest.
OCI_URI = re.compile(
    r"oci://(?P<host>[\w.-]{1,255}(:\d{1,5})?)(?P<path>/\w[\w./-]{0,254})"
    r"(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_UPLOAD = re.compile(UPLOADED + r"(?P<digest>[0-9a-f]{64})", re.ASCII)
_PEFT_NAMES = (CONFIG_NAME, WEIGHTS_NAME)
#: The lane of all local folders.
LOCAL_LANE = "local"


class Fetcher(Protocol):
    """A kind of remote source."""

    def accepts(self, uri: str) -> bool:
        """Whether this fetcher is for `uri`, by its text alone."""

    def fetch(self, uri: str, folder: Path, tenant_id: str) -> str:
        """Put an adapter's files into the empty `folder`, with the rights of this tenant; returns the URI that gives
        the same contents again.

        Raises SourceError, NotFound, AdapterTooLarge.
        """


#: `DiskTier.reserve` (folder, bytes, seconds to wait): reserves space for a download before its bytes come.
Reserve = Callable[[Path, int, float], None]


def unbounded(folder: Path, num_bytes: int, wait_s: float = 0.0) -> None:
    """A `Reserve` without a limit."""


class LocalSource(NamedTuple):
    """A folder or card under a root."""

    uri: str
    path: Path


class RemoteSource(NamedTuple):
    """A URI and its fetcher."""

    uri: str
    fetcher: Fetcher

    def fetch(self, folder: Path, tenant_id: str = DEFAULT_TENANT) -> str:
        return self.fetcher.fetch(self.uri, folder, tenant_id)


class Sources:
    """The sources of one service. `roots` are local folders; the first fetcher that accepts a URI gets it.

    `abandon` ends running fetches of a URI. `uploads`: the folder of an uploaded adapter, by its digest, if it is here.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        fetchers: Sequence[Fetcher] = (),
        abandon: Callable[[str], None] = lambda _: None,
        uploads: Callable[[str], Path | None] = lambda _: None,
    ) -> None:
        self._roots = roots
        self._fetchers = fetchers
        self.abandon = abandon
        self._uploads = uploads

    def is_local(self, source: str) -> bool:
        return "://" not in source

    def lane(self, source: str) -> str:
        """Sources of one lane may be slow together: `lane_of` a URI, or all local folders."""
        return LOCAL_LANE if self.is_local(source) or source.startswith(UPLOADED) else lane_of(source)

    def host(self, source: str) -> str:
        """Sources of one host may hang together: a host or bucket, or the hub with all its organisations."""
        return "hf" if source.startswith("hf://") else self.lane(source)

    def locate(self, source: str) -> LocalSource | RemoteSource:
        """Raises UnsafeSource for a source that is not allowed, NotFound for a missing local path."""
        if self.is_local(source):
            path = resolve_adapter_path(source, self._roots)
            return LocalSource(str(path), path)
        upload = _UPLOAD.fullmatch(source)
        if upload is not None:
            folder = self._uploads(upload["digest"])
            if folder is None:
                raise NotFound(f"{source} is not among the uploads of this machine; upload the weights again")
            return LocalSource(source, folder)
        match = _PLAIN_URI.fullmatch(source) or OCI_URI.fullmatch(source)
        if match is None or any(part in (".", "..") for part in (match["path"] or "").split("/")):
            raise UnsafeSource(
                f"{short(source)} is not a plain URI; user names, queries, escapes, '..' and chains are refused"
            )
        for fetcher in self._fetchers:
            if fetcher.accepts(source):
                return RemoteSource(source, fetcher)
        raise UnsafeSource(
            f"{short(source)} is not a source this server reads; name a folder under its roots, "
            "or have it allowed (adapters.hub, adapters.urls, adapters.custom_fetcher)"
        )


def lane_of(uri: str) -> str:
    """Scheme and host, or bucket, or the hub's organisation."""
    return "/".join(uri[:300].split("/")[:3])


def adapter_files(uri: str) -> tuple[str, ...]:
    """The names of the files at `uri`: a card, or PEFT's two; without the signature."""
    name = uri.rsplit("/", 1)[-1]
    return (name,) if name.endswith(CARD_SUFFIX) else _PEFT_NAMES


def signature_name(names: Sequence[str]) -> str:
    """The name of the signature file of an adapter that consists of these files."""
    return names[0] + SIGNATURE_SUFFIX if len(names) == 1 else SIGNATURE_NAME


def adapter_path(folder: Path) -> Path:
    """The adapter in a downloaded folder. AdapterFormatError if a file is missing or is not a plain file."""
    names = _names(folder)
    texts = [name for name in TEXT_FILES if len(names) > 1 and os.path.lexists(folder / name)]
    for name in (*names, *texts):
        try:
            status = (folder / name).lstat()
        except FileNotFoundError:
            raise AdapterFormatError(
                f"the source has no {name}; an adapter is {' and '.join(_PEFT_NAMES)}, or one {CARD_SUFFIX} file"
            ) from None
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise AdapterFormatError(f"'{name}' came as a link or a special file; a source must give plain files")
    return folder / names[0] if len(names) == 1 else folder


def clean_download(folder: Path) -> Path:
    """Remove everything that is not part of the adapter, then return `adapter_path`."""
    names = _names(folder)
    for file in folder.iterdir():
        if file.name in (*names, signature_name(names)) or (len(names) > 1 and file.name in TEXT_FILES):
            continue
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink()
    return adapter_path(folder)


def _names(folder: Path) -> tuple[str, ...]:
    cards = [file.name for file in folder.iterdir() if file.name.endswith(CARD_SUFFIX)]
    return tuple(cards) if len(cards) == 1 else _PEFT_NAMES
