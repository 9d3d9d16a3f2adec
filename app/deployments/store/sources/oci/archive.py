"""A reader of tar archives that only moves forward and holds one header at a time.

Python's tarfile keeps every member, reads extended headers of any size and follows offsets backwards, which an
attacker's archive may use. This reads POSIX (ustar, pax) and GNU archives as far as names and sizes of plain files go;
anything else, and any name that leads out of the archive, is refused by its name.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import zstandard

from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, AdapterTooLarge

_BLOCK = 512
_MAX_HEADER_BYTES = 64 << 10
_MAX_MEMBERS = 100_000
_CHUNK = 1 << 20
_FILE, _FOLDER, _LONG_NAME, _PAX, _PAX_GLOBAL = (b"0", b"\0", b"7"), b"5", b"L", b"x", b"g"
_REFUSED = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "sparse",
}  # fmt: skip


class Member(NamedTuple):
    """A plain file of an archive: its path, its size, and a function that writes its contents once."""

    path: str
    size_bytes: int
    copy_to: Callable[[Path], None]


@contextmanager
def open_archive(file: Path, compression: str, max_bytes: int) -> Iterator[Iterator[Member]]:
    """The plain files of a tar archive, in its order; compression: "", "gzip" or "zstd".

    Raises AdapterTooLarge if the archive unpacks to more than `max_bytes`, AdapterFormatError if it is damaged or has
    what it must not have.
    """
    with file.open("rb") as raw:
        stream: IO[bytes] = raw
        if compression == "gzip":
            stream = gzip.GzipFile(fileobj=raw)  # type: ignore[assignment]
        elif compression == "zstd":
            stream = zstandard.ZstdDecompressor(max_window_size=128 << 20).stream_reader(raw, read_across_frames=True)
        try:
            yield _members(_Reader(stream, max_bytes))
        except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            raise AdapterFormatError(f"the archive is damaged: {str(error)[:200]}") from error


def safe_path(name: str) -> str:
    """The path without empty and `.` parts. Raises AdapterFormatError if it leads elsewhere."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\\" in name or not name.isprintable():
        raise AdapterFormatError(f"the path {short(name)} leads out of its archive, or is not plain text")
    return "/".join(part for part in parts if part not in ("", "."))


class _Reader:
    """Reads forward, up to a number of bytes."""

    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self._stream = stream
        self._left = self._max = max_bytes

    def chunks(self, num_bytes: int) -> Iterator[bytes]:
        while num_bytes:
            chunk = self._stream.read(min(num_bytes, _CHUNK))
            if not chunk:
                raise AdapterFormatError("the archive ends within a file")
            self._left -= len(chunk)
            if self._left < 0:
                raise AdapterTooLarge(f"the archive unpacks to more than adapters.max_adapter_bytes {self._max} allows")
            num_bytes -= len(chunk)
            yield chunk

    def read(self, num_bytes: int) -> bytes:
        return b"".join(self.chunks(num_bytes))

    def skip(self, num_bytes: int) -> None:
        for _ in self.chunks(num_bytes):
            pass


def _members(reader: _Reader) -> Iterator[Member]:
    long_name: str | None = None
    long_size: int | None = None
    for _ in range(_MAX_MEMBERS):
        header = reader.read(_BLOCK)
        if not any(header):
            return
        kind, size, name = header[156:157], _number(header[124:136]), _name(header)
        if _number(header[148:156]) != sum(header[:148]) + sum(header[156:]) + 8 * 0x20:
            raise AdapterFormatError("the archive is damaged: a header's checksum is wrong")
        if kind in (_LONG_NAME, _PAX, _PAX_GLOBAL):
            contents = _extended_header(reader, size, name)
            if kind == _LONG_NAME:
                long_name = _text(contents.rstrip(b"\0"))
            elif kind == _PAX:
                records = _pax_records(contents)
                long_name = _text(records[b"path"]) if b"path" in records else long_name
                long_size = _decimal(records[b"size"]) if b"size" in records else long_size
            continue
        path = safe_path(name if long_name is None else long_name)
        size = size if long_size is None else long_size
        long_name = long_size = None
        if kind != _FOLDER and kind not in _FILE:
            raise AdapterFormatError(f"{short(path)} is {_REFUSED.get(kind, 'no plain file')}; pack plain files only")
        if kind == _FOLDER:
            continue
        left = [size]  # of this member, until its contents are read

        def copy_to(target: Path, left: list[int] = left) -> None:
            num_bytes, left[0] = left[0], 0
            with target.open("xb") as file:
                file.writelines(reader.chunks(num_bytes))

        yield Member(path, size, copy_to)
        reader.skip(left[0] + -size % _BLOCK)
    raise AdapterFormatError(f"the archive has more than {_MAX_MEMBERS} members")


def _extended_header(reader: _Reader, size: int, name: str) -> bytes:
    if size > _MAX_HEADER_BYTES:
        raise AdapterFormatError(f"the archive's header {short(name)} has {size} bytes; at most {_MAX_HEADER_BYTES}")
    contents = reader.read(size)
    reader.skip(-size % _BLOCK)
    return contents


def _pax_records(contents: bytes) -> dict[bytes, bytes]:
    """`LENGTH KEY=VALUE\\n`, where LENGTH is the record's own. AdapterFormatError if one is malformed, or sparse."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(contents):
        length = _decimal(contents[start : start + 8].partition(b" ")[0])
        record = contents[start : start + length]
        key, separator, value = record.partition(b" ")[2].partition(b"=")
        if not separator or len(record) != length or not value.endswith(b"\n"):
            raise AdapterFormatError("the archive is damaged: an extended header is malformed")
        if key.startswith(b"GNU.sparse"):
            raise AdapterFormatError("the archive has a sparse file; pack plain files only")
        records[key] = value[:-1]
        start += length
    return records


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 15:
        raise AdapterFormatError(f"the archive is damaged: {short(digits)} is no length")
    return int(digits)


def _number(field: bytes) -> int:
    """A number of a header: octal digits, or GNU's big-endian bytes after 0x80."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8) if b"_" not in digits and digits[:1] not in (b"-", b"+") else int("x")
    except ValueError:
        raise AdapterFormatError(f"the archive is damaged: {short(field)} is no number") from None


def _name(header: bytes) -> str:
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    is_posix = header[257:263] == b"ustar\0"  # GNU has other fields in place of a prefix
    return _text(prefix + b"/" + name if is_posix and prefix else name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
