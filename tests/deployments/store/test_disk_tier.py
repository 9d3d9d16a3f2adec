"""The disk tier: whole objects or none, whatever happens in between; bounded; the same after a restart."""

from __future__ import annotations

import errno
import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.deployments.store import disk_tier
from app.deployments.store.disk_tier import DiskTier
from app.deployments.store.tier_counters import TierCounters
from app.engine.errors import SourceError
from tests.deployments.store.recorded_events import RecordedEvents

Open = Callable[..., DiskTier]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    opened: list[DiskTier] = []

    def open_one(max_bytes: int = 10_000) -> DiskTier:
        opened.append(DiskTier(tmp_path, max_bytes, "lru", TierCounters(), RecordedEvents()))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def add(tier: DiskTier, digest: str, size: int = 100) -> bytes:
    contents = secrets.token_bytes(size)
    with tier.staging("a") as folder:
        (folder / "file").write_bytes(contents)
        assert tier.keep(digest, folder, 0.5)
    return contents


def read(tier: DiskTier, digest: str) -> bytes | None:
    with tier.reading(digest) as folder:
        return None if folder is None else (folder / "file").read_bytes()


def everything_under(tier: DiskTier) -> list[Path]:
    files = [path for path in tier._objects.parent.rglob("*") if path.is_file()]
    return [path for path in files if path.suffix != ".lock" and path.name != "guard"]


def test_what_is_kept_is_there_after_a_restart(open_tier: Open) -> None:
    tier = open_tier()
    contents = {digest: add(tier, digest) for digest in "abc"}
    assert {digest: read(tier, digest) for digest in "abc"} == contents
    assert read(tier, "d") is None
    again = open_tier()
    assert again.digests == set("abc")
    assert again.total_bytes == 300
    assert {digest: read(again, digest) for digest in "abc"} == contents


def test_bytes_are_bounded_and_the_order_of_use_survives(open_tier: Open) -> None:
    tier = open_tier(300)
    for time_s, digest in enumerate("abc"):
        add(tier, digest)
        os.utime(tier._folder(digest), (time_s, time_s))
    assert read(tier, "a") is not None
    tier = open_tier(300)
    add(tier, "d")
    assert tier.digests == set("acd"), "b was used longest ago"
    assert open_tier(200).digests == set("ad")
    assert len(everything_under(tier)) == 4


def test_an_object_that_is_read_stays(open_tier: Open) -> None:
    tier = open_tier(200)
    add(tier, "a")
    add(tier, "b")
    with tier.reading("a") as folder:
        assert folder is not None
        add(tier, "c")
        assert (folder / "file").exists()
        assert tier.digests == set("ac")
        with tier.staging("a") as staged:
            (staged / "file").write_bytes(bytes(150))
            assert not tier.keep("d", staged, 1.0), "no room beside what is being read"
    with tier.staging("a") as staged:
        (staged / "file").write_bytes(bytes(150))
        assert tier.keep("d", staged, 1.0)
    assert tier.digests == set("d")


def _die_at(root: str, where: str) -> None:
    """Write an object, and be killed at the n-th call that changes the disk."""
    remaining = int(where)

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return run

    tier = DiskTier(Path(root), 250, "lru", TierCounters(), RecordedEvents())
    for name in ("write_bytes", "write_text", "rename", "mkdir"):
        setattr(Path, name, counted(getattr(Path, name)))
    disk_tier._flush = counted(disk_tier._flush)  # type: ignore[assignment]
    disk_tier.shutil.rmtree = counted(disk_tier.shutil.rmtree)  # type: ignore[assignment]
    for digest in ("x", "y", "z"):  # the third has no room beside the others
        with tier.staging("a") as folder:
            (folder / "file").write_bytes(digest.encode() * 100)
            tier.keep(digest, folder, 1.0)
    os._exit(7)


def test_a_crash_at_any_step_leaves_whole_objects_and_no_litter(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    exit_codes: list[int | None] = []
    steps = range(0, 40, 4)
    processes = [context.Process(target=_die_at, args=(str(tmp_path / str(step)), str(step))) for step in steps]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        exit_codes.append(process.exitcode)
    assert exit_codes[0] == -signal.SIGKILL
    assert exit_codes[-1] == 7
    for step in steps:
        tier = DiskTier(tmp_path / str(step), 250, "lru", TierCounters(), RecordedEvents())
        for digest in tier.digests:
            assert read(tier, digest) == digest.encode() * 100
        assert tier.total_bytes == 100 * len(tier.digests) <= 250
        assert len(everything_under(tier)) == 2 * len(tier.digests), "objects and their entries, nothing else"
        tier.close()


def test_another_processes_download_is_left_alone(open_tier: Open) -> None:
    first = open_tier()
    with first.staging("a") as folder:
        (folder / "file").write_bytes(bytes(10))
        open_tier()
        assert (folder / "file").exists()
        assert first.keep("a", folder, 1.0)


@pytest.mark.parametrize("step", range(6))
def test_a_process_that_starts_at_the_same_time_leaves_our_downloads_alone(
    open_tier: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Another one starts before our step-th call that touches the disk: it may have to wait, and takes nothing."""
    remaining = step
    other = threading.Thread(target=lambda: DiskTier(tmp_path, 10_000, "lru", TierCounters(), RecordedEvents()).close())

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal remaining
            if threading.current_thread() is not other:
                remaining -= 1
                if remaining == -1:
                    other.start()
                    other.join(0.5)  # it is through, or waits for us
            return call(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        patch.setattr(Path, "open", counted(Path.open))
        patch.setattr(disk_tier.fcntl, "flock", counted(disk_tier.fcntl.flock))
        tier = open_tier()
    assert remaining < 0, "the step was reached"
    other.join(120)
    contents = add(tier, "a")
    assert read(tier, "a") == contents


def test_a_staging_folder_without_a_lock_is_litter(open_tier: Open) -> None:
    first = open_tier()
    litter = first._staging.with_name("1-dead")
    litter.mkdir()
    (litter / "file").write_bytes(bytes(10))
    open_tier()
    assert not litter.exists()
    assert first._staging.is_dir()


def test_two_processes_may_keep_the_same(open_tier: Open) -> None:
    one, two = open_tier(), open_tier()
    add(one, "a")
    add(two, "a")
    one.remove("a")
    assert read(two, "a") is None, "gone is a miss, not an error"
    assert two.total_bytes == 0
    add(two, "a")
    assert read(two, "a") is not None


@pytest.mark.parametrize("damage", ["shorter", "missing", "no entry", "bad entry"])
def test_an_object_that_lost_a_byte_is_removed_at_the_latest_when_it_is_wanted(open_tier: Open, damage: str) -> None:
    tier = open_tier()
    add(tier, "a")
    add(tier, "b")
    folder = tier._folder("a")
    {
        "shorter": lambda: (folder / "file").write_bytes(bytes(99)),
        "missing": (folder / "file").unlink,
        "no entry": (folder / "entry.json").unlink,
        "bad entry": lambda: (folder / "entry.json").write_text("[]"),
    }[damage]()
    again = open_tier()
    for one in (tier, again):
        assert read(one, "a") is None
        assert not folder.exists()
    assert again.digests == tier.digests == {"b"}
    assert read(again, "b") is not None


def test_a_full_disk_changes_nothing(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(200)
    add(tier, "a")

    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_tier, "_flush", full)
    with tier.staging("a") as folder:
        (folder / "file").write_bytes(bytes(50))
        with pytest.raises(OSError, match="No space"):
            tier.keep("b", folder, 1.0)
    monkeypatch.undo()
    assert tier.digests == {"a"}
    assert tier.total_bytes == 100
    assert read(tier, "a") is not None


def test_a_disk_that_can_only_be_read_keeps_what_it_has_and_says_why_it_takes_no_download(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(200)
    add(tier, "a")

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as disk:
        disk.setattr(os, "mkdir", read_only)
        with pytest.raises(SourceError, match="Read-only file system"), tier.staging("a"):
            pass
        assert read(tier, "a") is not None
    add(tier, "b")
    assert read(tier, "b") is not None


def test_threads_keep_the_books(open_tier: Open) -> None:
    tier = open_tier(1000)

    def work(number: int) -> None:
        for index in range(20):
            digest = str((number * 7 + index) % 13)
            if read(tier, digest) is None:
                add(tier, digest)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.total_bytes == 100 * len(tier.digests) <= 1000
    assert len(everything_under(tier)) == 2 * len(tier.digests)


def test_what_is_pinned_is_not_given_up_and_what_goes_is_told(tmp_path: Path) -> None:
    told = RecordedEvents()
    tier = DiskTier(tmp_path, 300, "lru", TierCounters(), told, pinned=["a"])
    for digest in "abcd":
        add(tier, digest)
    assert tier.digests == set("acd")
    assert told.moves == [("deleted from disk", "b")]
    tier.pin(["c"])
    add(tier, "e")
    assert tier.digests == set("cde")
    with tier.staging("a") as folder:
        (folder / "file").write_bytes(bytes(250))
        assert not tier.keep("large", folder, 0.5), "no room beside what is pinned"
    tier.remove("c")
    assert told.moves == [("deleted from disk", digest) for digest in "bac"]
    tier.close()
    again = DiskTier(tmp_path, 150, "lru", TierCounters(), RecordedEvents(), pinned=["d"])
    assert again.digests == {"d"}, "also at start, though it was used longer ago"
    again.close()


def test_nobody_waits_while_the_disk_is_busy_with_anothers_files(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flushing and deleting take as long as the files are large; the store's event loop takes the same lock."""
    tier = open_tier(250)
    waits: dict[str, bool] = {}

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            waits[name] = waits.get(name, False) or tier._lock.locked()
            return call(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(disk_tier, "_flush", noted("flush", disk_tier._flush))
        patch.setattr(disk_tier.shutil, "rmtree", noted("delete", disk_tier.shutil.rmtree))
        for digest in "abc":  # the third evicts the first
            add(tier, digest)
        tier.remove("b")
    assert tier.digests == {"c"}
    assert waits == {"flush": False, "delete": False}
