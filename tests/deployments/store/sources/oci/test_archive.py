"""Archives: what Python's tarfile writes is read as it is; what leads outside or links is refused by name."""

from __future__ import annotations

import io
import random
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from app.deployments.store.sources.oci.archive import open_archive
from app.engine.errors import AdapterFormatError, AdapterTooLarge
from tests.deployments.store.sources.oci.registry import compress, tar

LIMIT = 1 << 22


def read(data: bytes, folder: Path, compression: str = "", max_bytes: int = LIMIT) -> dict[str, bytes]:
    folder = Path(tempfile.mkdtemp(dir=folder))
    file = folder / "archive"
    file.write_bytes(data)
    found = {}
    with open_archive(file, compression, max_bytes) as members:
        for number, member in enumerate(members):
            if not member.path.endswith(".skipped"):
                member.copy_to(folder / str(number))
                found[member.path] = (folder / str(number)).read_bytes()
                assert len(found[member.path]) == member.size_bytes
    return found


@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_tarfile_writes_is_read(tmp_path: Path, kind: int, compression: str) -> None:
    draw = random.Random(kind)
    sizes = [0, 1, 511, 512, 513, 1024, 100_000, *(draw.randrange(5000) for _ in range(20))]
    files = {
        "/".join("x" * draw.randrange(1, 40) for _ in range(draw.randrange(1, 4))) + str(size): draw.randbytes(size)
        for size in sizes
    }
    files |= {"some.skipped": b"x" * 700, ("d" * 90 + "/") + "f" * 90: b"long"}
    if kind != tarfile.USTAR_FORMAT:
        files |= {"é" * 120: b"accents", "y" * 300 + "/z": b"very long"}
    found = read(tar(files, compression, kind), tmp_path, compression)
    assert found == {name: data for name, data in files.items() if not name.endswith(".skipped")}


def test_names_lose_their_dots(tmp_path: Path) -> None:
    assert read(tar({"./a//b/./c": b"1"}), tmp_path) == {"a/b/c": b"1"}


def archive_of(kind: bytes, name: str = "a/weights", link: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, link
        archive.addfile(member)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.SYMTYPE, "symbolic link"), (tarfile.LNKTYPE, "hard link"), (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"), (tarfile.FIFOTYPE, "pipe"), (b"V", "no plain file"),
    ],
)  # fmt: skip
def test_what_is_no_plain_file_is_refused_by_its_name(tmp_path: Path, kind: bytes, what: str) -> None:
    with pytest.raises(AdapterFormatError, match=f"'a/weights' is a? ?{what}"):
        read(archive_of(kind, link="/etc/passwd"), tmp_path)
    assert read(archive_of(tarfile.DIRTYPE), tmp_path) == {}


@pytest.mark.parametrize("name", ["../up", "a/../../up", "/etc/up", "a\\..\\up", "a\nup", "..", "a/.."])
def test_a_name_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        with pytest.raises(AdapterFormatError, match=r"up|'\.\.'|'a/\.\.'"):
            read(tar({name: b"x"}, kind=kind), tmp_path)


@pytest.mark.parametrize("compression", ["gzip", "zstd", ""])
def test_a_bomb_ends_at_the_limit(tmp_path: Path, compression: str) -> None:
    data = tar({"a": bytes(1 << 20)}, compression)
    assert len(data) < 10_000 or not compression
    with pytest.raises(AdapterTooLarge, match="max_adapter_bytes 1000000"):
        read(data, tmp_path, compression, 1_000_000)
    with pytest.raises(AdapterTooLarge):
        read(tar({"a.skipped": bytes(1 << 20)}, compression), tmp_path, compression, 1_000_000)


def with_size(field: bytes) -> bytes:
    """An archive whose first header has this size field, and a checksum that fits."""
    data = bytearray(tar({"a": b"x" * 600}, kind=tarfile.USTAR_FORMAT))
    data[124:136] = field
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def test_numbers_are_octal_or_gnus_binary(tmp_path: Path) -> None:
    assert read(with_size(b"\x80" + (600).to_bytes(11, "big")), tmp_path) == {"a": b"x" * 600}
    for field in (b"\xff" * 12, b"-0000000001\0", b"0000_0001\0\0\0", b"00000000008\0", b"0x10\0\0\0\0\0\0\0\0"):
        with pytest.raises(AdapterFormatError, match="no number"):
            read(with_size(field), tmp_path)
    with pytest.raises((AdapterFormatError, AdapterTooLarge), match=r"ends within|unpacks to more"):
        read(with_size(b"\x80" + b"\xff" * 11), tmp_path)


def pax(records: bytes) -> bytes:
    """An archive with these extended headers before one file."""
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(records)
    return header.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512) + tar({"a": b"x"})


@pytest.mark.parametrize(
    "records",
    [b"99 path=b\n", b"0 path=b\n", b"9path=b\n\n", b"x path=b\n", b"10 path:b\n", b"10 path=bc", b"-9 path=b\n",
     b"9" * 5000, b"22 GNU.sparse.major=1\n", b"12 size=-10\n", b"11 size=x1\n"],
)  # fmt: skip
def test_extended_headers_that_are_malformed(tmp_path: Path, records: bytes) -> None:
    with pytest.raises(AdapterFormatError):
        read(pax(records), tmp_path)


def test_extended_headers_are_short_and_their_names_checked(tmp_path: Path) -> None:
    assert read(pax(b"10 path=b\n"), tmp_path) == {"b": b"x"}
    with pytest.raises(AdapterFormatError, match="leads out"):
        read(pax(b"14 path=../bc\n"), tmp_path)
    with pytest.raises(AdapterFormatError, match="at most 65536"):
        read(pax(b"%d comment=%s\n" % (100_016, b"x" * 100_000)), tmp_path)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("damage", [cut, flipped, lambda _: b"", lambda _: b"no archive" * 100])
@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
def test_damage_is_a_format_error(tmp_path: Path, compression: str, damage: Callable[[bytes], bytes]) -> None:
    data = damage(compress(tar({"a": random.Random(0).randbytes(5000)}), compression))
    with pytest.raises(AdapterFormatError, match=r"damaged|ends within"):
        read(data, tmp_path, compression)
