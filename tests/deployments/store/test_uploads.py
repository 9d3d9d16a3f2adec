"""Uploads: whole, bounded, there as long as something names them, and no longer."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import delete

from app.deployments.registry.db.database import Database, sqlite_url
from app.deployments.registry.db.storage_tables import file_parts
from app.deployments.registry.models import UPLOADED
from app.deployments.store import upload_copies
from app.deployments.store.sources.source_resolution import LocalSource, Sources
from app.deployments.store.upload_copies import UploadCopies
from app.deployments.store.uploads import ARRIVAL_S, GRACE_S, Uploads
from app.engine.errors import AdapterTooLarge, NotFound, NotReady, QueueFull, UnsafeSource
from tests.deployments.managed import complete_upload


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uploads(tmp_path: Path, clock: Clock) -> Uploads:
    return Uploads(tmp_path / "uploads", 100, clock)


def test_an_upload_is_a_source_by_its_contents(uploads: Uploads) -> None:
    sources = Sources([], uploads=uploads.folder)
    with complete_upload(uploads, b"{}", b"weights") as source, complete_upload(uploads, b"{}", b"weights") as again:
        assert source == again
        place = sources.locate(source)
        assert isinstance(place, LocalSource)
        assert sorted(file.name for file in place.path.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        assert (place.path / "adapter_model.safetensors").read_bytes() == b"weights"
    with complete_upload(uploads, b"{}w", b"eights") as other:
        assert other != source, "where one file ends is part of it"
    assert len(list(uploads.root.iterdir())) == 2
    assert sources.lane(source) == "local"


@pytest.mark.parametrize("name", ["", "../x", "A" * 64, "a" * 63, "a" * 64 + "/..", "a" * 64 + "\n"])
def test_nothing_else_is_one(uploads: Uploads, name: str) -> None:
    with pytest.raises(UnsafeSource):
        Sources([uploads.root], uploads=uploads.folder).locate(UPLOADED + name)
    with pytest.raises(NotFound):
        Sources([], uploads=uploads.folder).locate(UPLOADED + "a" * 64)


def test_what_nothing_names_goes_after_a_while(uploads: Uploads, clock: Clock) -> None:
    with complete_upload(uploads, b"{}", b"one") as one:
        clock.now_s = 10 * GRACE_S
        assert uploads.sweep(()) == 0, "it is being loaded"
    with complete_upload(uploads, b"{}", b"two") as two:
        pass
    assert uploads.sweep({one}) == 0
    clock.now_s += GRACE_S - 1
    assert uploads.sweep({one}) == 0
    assert uploads.sweep({one, two}) == 0, "it is named again: its time begins anew"
    clock.now_s += 1
    assert uploads.sweep({one}) == 0
    clock.now_s += GRACE_S
    assert uploads.sweep({one}) == 1
    assert [UPLOADED + folder.name for folder in uploads.root.iterdir()] == [one]


def test_uploads_are_bounded_together(uploads: Uploads) -> None:
    with pytest.raises(AdapterTooLarge), complete_upload(uploads, b"{}", bytes(99)):
        pass
    with complete_upload(uploads, b"{}", bytes(60)) as first:
        uploads.sweep({first})
        with pytest.raises(QueueFull), complete_upload(uploads, b"{}", b"x" * 60):
            pass
    with pytest.raises(QueueFull), complete_upload(uploads, b"{}", b"x" * 60):
        pass
    uploads.sweep(())
    with complete_upload(uploads, b"{}", b"x" * 60):
        assert len(list(uploads.root.iterdir())) == 1, "what nothing names makes room at once"


def test_what_is_uploaded_again_makes_no_room(uploads: Uploads) -> None:
    """It is named again, although no sweep has seen that yet."""
    with complete_upload(uploads, b"{}", bytes(60)) as source:
        pass
    uploads.sweep(())
    with complete_upload(uploads, b"{}", bytes(60)) as again:
        assert again == source
    with pytest.raises(QueueFull), complete_upload(uploads, b"{}", b"x" * 60):
        pass
    assert uploads.folder(source.removeprefix(UPLOADED)) is not None


def test_a_restart_finds_what_was_whole(uploads: Uploads, clock: Clock) -> None:
    with complete_upload(uploads, b"{}", bytes(60)) as source:
        pass
    (uploads.root / "abc.part").mkdir()
    os.utime(uploads.root / "abc.part", (time.time() - ARRIVAL_S,) * 2)
    again = Uploads(uploads.root, 100, clock)
    again.sweep({source})
    assert [UPLOADED + folder.name for folder in uploads.root.iterdir()] == [source]
    with pytest.raises(QueueFull), complete_upload(again, b"{}", b"x" * 60):
        pass


def test_two_services_that_share_a_registry_on_one_machine_share_the_folder(uploads: Uploads, clock: Clock) -> None:
    arriving = uploads.begin(b"{}", "a")
    uploads.write(arriving, 0, b"wei")
    other = Uploads(uploads.root, 100, clock)
    other.sweep(())
    uploads.write(arriving, 3, b"ghts")
    with uploads.end(arriving) as source, complete_upload(other, b"{}", b"weights") as same:
        assert source == same
        assert [UPLOADED + folder.name for folder in uploads.root.iterdir()] == [source]
    clock.now_s += GRACE_S
    for _ in range(2):
        other.sweep(())
        clock.now_s += GRACE_S
    assert list(uploads.root.iterdir()) == []
    with complete_upload(uploads, b"{}", b"weights") as again:
        assert [UPLOADED + folder.name for folder in uploads.root.iterdir()] == [again], "the other has removed it"


@pytest.mark.parametrize(("function", "number"), [("fsync", errno.ENOSPC), ("mkdir", errno.EROFS)])
def test_a_disk_that_takes_no_files_refuses_an_upload_and_holds_no_room_for_it(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as disk:
        disk.setattr(os, function, fail)
        reason = rf"state_dir \({os.strerror(number)}\)"
        with pytest.raises(QueueFull, match=reason), complete_upload(uploads, b"{}", b"w" * 90):
            pass
    assert list(uploads.root.iterdir()) == []
    with complete_upload(uploads, b"{}", b"v" * 90) as source:
        assert source.startswith(UPLOADED)


def test_parts_may_come_twice_and_an_upload_without_new_ones_is_discarded(uploads: Uploads, clock: Clock) -> None:
    upload_id, late = uploads.begin(b"{}", "a"), uploads.begin(b"{}", "a")
    for offset, part in ((0, b"wei"), (0, b"wei"), (3, b"ghts")):
        uploads.write(upload_id, offset, part)
    clock.now_s += ARRIVAL_S - 1
    uploads.write(upload_id, 3, b"ghts")
    clock.now_s += 1
    uploads.sweep(())
    with pytest.raises(NotReady, match="send the adapter again"):
        uploads.write(late, 0, b"x")
    with uploads.end(upload_id) as source, complete_upload(uploads, b"{}", b"weights") as same:
        assert source == same
        assert len(list(uploads.root.iterdir())) == 1
    with pytest.raises(NotReady):
        uploads.end(upload_id).__enter__()
    assert uploads._arriving == {}


def test_one_tenant_s_arriving_uploads_leave_half_of_the_room(uploads: Uploads) -> None:
    first, second, other = (uploads.begin(b"{}", tenant) for tenant in ("flood", "flood", "victim"))
    uploads.write(first, 0, bytes(40))
    with pytest.raises(QueueFull, match="leave no room for 10 bytes"):
        uploads.write(second, 0, bytes(10))
    uploads.write(other, 0, bytes(48))
    uploads.discard(first)
    uploads.write(second, 0, bytes(40))


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadCopies]:
    monkeypatch.setattr(upload_copies, "PART_BYTES", 8)
    database = Database(sqlite_url(tmp_path / "registry.sqlite"), "base")
    yield UploadCopies(database)
    database.close()


def test_another_machine_has_what_was_uploaded_here(tmp_path: Path, clock: Clock, copies: UploadCopies) -> None:
    here, there = (Uploads(tmp_path / name, 1000, clock, copies) for name in ("here", "there"))
    weights = os.urandom(21)
    with complete_upload(here, b"{}", weights) as source:
        digest = source.removeprefix(UPLOADED)
    found = Sources([], uploads=there.folder).locate(source)
    assert isinstance(found, LocalSource)
    assert (found.path / "adapter_config.json").read_bytes() == b"{}"
    assert (found.path / "adapter_model.safetensors").read_bytes() == weights
    assert {folder.name for folder in there.root.iterdir()} == {digest}
    for now_s in (0.0, GRACE_S):
        clock.now_s = now_s
        for uploads in (here, there):
            uploads.sweep({source})
    assert copies.digests() == {digest}
    for now_s in (GRACE_S, 2 * GRACE_S):
        clock.now_s = now_s
        there.sweep(())
    assert copies.digests() == set()
    assert there.folder(digest) is None
    here.sweep({source})
    assert copies.digests() == {digest}, "what is in use is copied, whoever removed the copy or never made one"


def test_a_copy_that_is_incomplete_or_damaged_is_none(tmp_path: Path, clock: Clock, copies: UploadCopies) -> None:
    here = Uploads(tmp_path / "here", 1000, clock, copies)
    digests = []
    for content in (b"a", b"b"):
        with complete_upload(here, b"{}", content * 16) as source:
            digests.append(source.removeprefix(UPLOADED))
    with copies._database.write() as connection:
        connection.execute(delete(file_parts).where(file_parts.c.file_id == digests[0], file_parts.c.number == 0))
        connection.execute(delete(file_parts).where(file_parts.c.file_id == digests[1], file_parts.c.number == 2))
    there = Uploads(tmp_path / "there", 1000, clock, copies)
    assert [there.folder(digest) for digest in digests] == [None, None]
    assert list(there.root.iterdir()) == []
    with complete_upload(here, b"{}", b"a" * 16):
        assert there.folder(digests[0]) is not None, "uploaded again, it is copied again"


def test_a_disk_that_takes_no_copy_says_so(
    tmp_path: Path, clock: Clock, copies: UploadCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (Uploads(tmp_path / name, 1000, clock, copies) for name in ("here", "there"))
    with complete_upload(here, b"{}", b"weights") as source:
        digest = source.removeprefix(UPLOADED)

    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(copies, "restore", full)
        with pytest.raises(NotReady, match="No space left on device"):
            there.folder(digest)
    assert list(there.root.iterdir()) == []
    assert there.folder(digest) is not None
