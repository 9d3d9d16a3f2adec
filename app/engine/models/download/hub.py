"""Downloads files from a Hugging Face hub, by `hf://org/name@revision`.

A revision is a branch, tag or commit; downloads are named by their commit, so the same contents can be fetched again.
`HF_ENDPOINT` or an argument selects another hub. The caller provides the token, which is never logged.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from app.engine.errors import AdapterTooLarge, NotFound, SourceError
from app.engine.models.download.digest import file_sha256

logger = logging.getLogger(__name__)

_URI = re.compile(r"hf://(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)@(?P<revision>[\w][\w./-]*)")


class HubUri(NamedTuple):
    """A repository and a revision."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"hf://{self.repo}@{self.revision}"


class HubListing(NamedTuple):
    """A resolved revision: its commit, and every file with its size in bytes."""

    uri: HubUri
    sizes: dict[str, int]


def parse_hub_uri(uri: str) -> HubUri:
    """SourceError if `uri` is not a hub URI."""
    match = _URI.fullmatch(uri)
    if match is None or ".." in match["revision"]:
        raise SourceError(f"{uri!r} is not of the form hf://org/name@revision (a branch, tag or commit)")
    return HubUri(match["repo"], match["revision"])


def hub_snapshot(uri: str, cache_dir: Path, patterns: Sequence[str]) -> Path:
    """The folder with the matching files, from the hub's own cache if possible.

    Raises SourceError, also for a file that does not match the checksum that the hub gave for it.
    """
    repo, revision = parse_hub_uri(uri)
    import huggingface_hub  # heavy, and rarely needed

    with _hub_errors(uri):
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, cache_dir=cache_dir, allow_patterns=list(patterns)
        )
    for file in Path(folder).rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            _check_sum(file, uri)
    return Path(folder)


def _check_sum(file: Path, uri: str) -> None:
    """Compare a file of the hub's cache with its checksum: it is a link to a file that has its checksum for a name, a
    SHA-256 for large files, git's SHA-1 for the others.
    """
    stated = file.resolve().name
    if re.fullmatch("[0-9a-f]{64}", stated):
        found = file_sha256(file)
    elif re.fullmatch("[0-9a-f]{40}", stated):
        content = file.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    else:
        logger.warning("%s of %s is not checked: the hub's cache has no checksum for it", file.name, uri)
        return
    if found != stated:
        raise SourceError(
            f"{file.name} of {uri} has checksum {found}, but the hub says {stated}; remove {file.resolve()}"
        )


def list_hub_files(uri: str, *, endpoint: str | None, token: str | None, timeout_s: float) -> HubListing:
    """List a revision's files with one call to the hub. Raises SourceError, NotFound."""
    repo, revision = parse_hub_uri(uri)
    import huggingface_hub

    with _hub_errors(uri, endpoint):
        info = huggingface_hub.HfApi(endpoint=endpoint, token=token or False).model_info(
            repo, revision=revision, files_metadata=True, timeout=timeout_s
        )
    if info.sha is None:
        raise SourceError(f"the hub names no commit for {uri}")
    return HubListing(HubUri(repo, info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()})


def download_hub_files(
    listing: HubListing,
    names: Sequence[str],
    folder: Path,
    *,
    max_bytes: int,
    endpoint: str | None,
    token: str | None,
) -> None:
    """Download these root files of a repository into `folder`. Raises SourceError, NotFound, AdapterTooLarge."""
    import huggingface_hub

    uri = listing.uri
    for name in names:
        size = listing.sizes.get(name)
        if size is None:
            raise NotFound(f"{uri} has no file {name}")
        if size > max_bytes:
            raise AdapterTooLarge(f"{name} of {uri} has {size} bytes but at most {max_bytes} are read")
        with _hub_errors(str(uri), endpoint):
            huggingface_hub.hf_hub_download(
                uri.repo, name, revision=uri.revision, local_dir=folder, endpoint=endpoint, token=token or False
            )


@contextmanager
def _hub_errors(uri: str, endpoint: str | None = None) -> Iterator[None]:
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise NotFound(
            f"the hub has no {uri}, or the token (LORA_HF_TOKEN, or a project's own) may not see it"
        ) from error
    except Exception as error:
        # The hub's own errors and those of its HTTP library, which changes between versions.
        raise SourceError(f"cannot fetch {uri} from {endpoint or ENDPOINT}: {error}") from error
