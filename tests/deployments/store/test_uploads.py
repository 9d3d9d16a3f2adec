"""Uploads: whole, bounded, there as long as something names them, and no longer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from app.deployments.registry.models import UPLOADED
from app.deployments.store.sources.source_resolution import LocalSource, Sources
from app.deployments.store.uploads import GRACE_S, Uploads
from app.engine.errors import AdapterTooLarge, NotFound, QueueFull, UnsafeSource


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
    sources = Sources([], uploads=uploads.root)
    with uploads.store(b"{}", b"weights") as source, uploads.store(b"{}", b"weights") as again:
        assert source == again
        place = sources.locate(source)
        assert isinstance(place, LocalSource)
        assert sorted(file.name for file in place.path.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        assert (place.path / "adapter_model.safetensors").read_bytes() == b"weights"
    with uploads.store(b"{}w", b"eights") as other:
        assert other != source, "where one file ends is part of it"
    assert len(list(uploads.root.iterdir())) == 2
    assert sources.lane(source) == "local"


@pytest.mark.parametrize("name", ["", "../x", "A" * 64, "a" * 63, "a" * 64 + "/..", "a" * 64 + "\n"])
def test_nothing_else_is_one(uploads: Uploads, name: str) -> None:
    with pytest.raises(UnsafeSource):
        Sources([uploads.root], uploads=uploads.root).locate(UPLOADED + name)
    with pytest.raises(NotFound):
        Sources([], uploads=uploads.root).locate(UPLOADED + "a" * 64)


def test_what_nothing_names_goes_after_a_while(uploads: Uploads, clock: Clock) -> None:
    with uploads.store(b"{}", b"one") as one:
        clock.now_s = 10 * GRACE_S
        assert uploads.sweep(()) == 0, "it is being loaded"
    with uploads.store(b"{}", b"two") as two:
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
    with pytest.raises(AdapterTooLarge), uploads.store(b"{}", bytes(99)):
        pass
    with uploads.store(b"{}", bytes(60)) as first:
        uploads.sweep({first})
        with pytest.raises(QueueFull), uploads.store(b"{}", b"x" * 60):
            pass
    with pytest.raises(QueueFull), uploads.store(b"{}", b"x" * 60):
        pass
    uploads.sweep(())
    with uploads.store(b"{}", b"x" * 60):
        assert len(list(uploads.root.iterdir())) == 1, "what nothing names makes room at once"


def test_a_restart_finds_what_was_whole(uploads: Uploads, clock: Clock) -> None:
    with uploads.store(b"{}", bytes(60)) as source:
        pass
    (uploads.root / "abc.part").mkdir()
    again = Uploads(uploads.root, 100, clock)
    assert [UPLOADED + folder.name for folder in uploads.root.iterdir()] == [source]
    again.sweep({source})
    with pytest.raises(QueueFull), again.store(b"{}", b"x" * 60):
        pass


def test_a_full_disk_refuses_an_upload_and_holds_no_room_for_it(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(QueueFull, match="state_dir"), uploads.store(b"{}", b"w" * 90):
            pass
    assert list(uploads.root.iterdir()) == []
    with uploads.store(b"{}", b"v" * 90) as source:
        assert source.startswith(UPLOADED)
