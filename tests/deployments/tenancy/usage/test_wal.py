"""What a process had counted when it was killed is in the ledger, once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.deployments.tenancy.usage.flusher import LedgerKey, Row, UsageFlusher, UsageRecord
from app.deployments.tenancy.usage.wal import UsageWal, open_wal
from app.engine.errors import InvalidRequest, NotReady

KEY = LedgerKey(7, "p", "k", "m", "", "completions")
OTHER = KEY._replace(model="sql", digest="d")

#: Counts three things; one batch is at the ledger, unacknowledged, when the process is killed.
KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from app.deployments.tenancy.usage.wal import UsageWal
from app.deployments.tenancy.usage.flusher import LedgerKey, UsageFlusher, UsageRecord

key = LedgerKey(7, "p", "k", "m", "", "completions")

async def run():
    async def write(writer, number, rows):
        metering.add(key._replace(model="sql", digest="d"), UsageRecord(0, 5))
        os.kill(os.getpid(), signal.SIGKILL)
    metering = UsageFlusher(write, "victim", UsageWal(Path(sys.argv[1]), "victim"))
    metering.add(key, UsageRecord(1, 10))
    metering.add(key, UsageRecord(1, 20))
    await metering.flush()

asyncio.run(run())
"""


class Ledger:
    """Takes each batch once, as the real one does."""

    def __init__(self) -> None:
        self.batches: dict[tuple[str, int], Sequence[Row]] = {}
        self.is_away = False

    async def write(self, writer_id: str, number: int, rows: Sequence[Row]) -> None:
        if self.is_away:
            raise NotReady("it restarts")
        if any(key.model == "refused" for key, _ in rows):
            raise InvalidRequest("a text is too long")
        assert self.batches.setdefault((writer_id, number), rows) == rows, "a batch is sent as it was"


def metering_in(folder: Path, ledger: Ledger, name: str) -> UsageFlusher:
    return UsageFlusher(ledger.write, name, UsageWal(folder, name))


async def test_what_a_killed_process_had_counted_is_written_down_by_another(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    ledger = Ledger()
    heir = metering_in(tmp_path, ledger, "heir")
    ledger.is_away = True
    await heir.adopt()
    ledger.is_away = False
    await heir.adopt()
    await heir.adopt()
    first, second = ((KEY, UsageRecord(2, 30)),), ((OTHER, UsageRecord(0, 5)),)
    assert ledger.batches == {("victim", 1): first, ("victim", 2): second}
    await heir.close()
    assert list(tmp_path.iterdir()) == []


async def test_who_lives_is_left_alone_and_leaves_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    first, second = metering_in(tmp_path, ledger, "first"), metering_in(tmp_path, ledger, "second")
    first.add(KEY, UsageRecord(1, 10))
    await second.adopt()
    assert ledger.batches == {}
    await first.close()
    await second.close()
    assert ledger.batches == {("first", 1): ((KEY, UsageRecord(1, 10)),)}
    assert list(tmp_path.iterdir()) == []


async def test_who_ends_while_the_ledger_is_away_is_inherited(tmp_path: Path) -> None:
    ledger = Ledger()
    leaving = metering_in(tmp_path, ledger, "leaving")
    leaving.add(KEY, UsageRecord(1, 10))
    ledger.is_away = True
    await leaving.close()
    ledger.is_away = False
    heir = metering_in(tmp_path, ledger, "heir")
    await heir.adopt()
    assert ledger.batches == {("leaving", 1): ((KEY, UsageRecord(1, 10)),)}
    await heir.close()


async def test_what_the_ledger_can_never_take_holds_up_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, model in (("a", "refused"), ("b", "m")):
        (tmp_path / f"{name}.lock").touch()
        (tmp_path / f"{name}.1.batch").write_text(json.dumps([*KEY._replace(model=model), *UsageRecord(1, 10)]) + "\n")
    ledger = Ledger()
    heir = metering_in(tmp_path, ledger, "heir")
    await heir.adopt()
    heir.add(KEY._replace(model="refused"), UsageRecord(1, 5))
    assert await heir.flush()
    heir.add(KEY, UsageRecord(1, 7))
    assert await heir.flush()
    assert ledger.batches == {("b", 1): ((KEY, UsageRecord(1, 10)),), ("heir", 2): ((KEY, UsageRecord(1, 7)),)}
    assert caplog.text.count("that the ledger refuses: a text is too long") == 2
    await heir.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "torn.lock").touch()
    (tmp_path / "torn.3.batch").write_text(json.dumps([*KEY, *UsageRecord(1, 10)]) + "\n" + '[7, "p"')
    ledger = Ledger()
    heir = metering_in(tmp_path, ledger, "heir")
    await heir.adopt()
    assert ledger.batches == {("torn", 3): ((KEY, UsageRecord(1, 10)),)}
    await heir.close()


def test_what_a_newer_release_counted_is_kept_for_its_like(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newer = UsageWal(tmp_path, "newer")
    for number in (1, 2):
        newer.add(number, KEY, UsageRecord(1, 10))
    newer.close()
    first = tmp_path / "newer.1.batch"
    content = json.dumps([*KEY, *UsageRecord(1, 10), 5]).encode() + b"\n"
    first.write_bytes(content)
    assert list(UsageWal(tmp_path, "today").orphans()) == []
    assert first.read_bytes() == content
    assert "newer.1.batch has fields that this version does not know; keeping the file" in caplog.text
    first.write_bytes(json.dumps([*KEY, *UsageRecord(1, 10)]).encode() + b"\n")
    assert [batch.number for batch in UsageWal(tmp_path, "later").orphans()] == [1, 2]


def test_where_nothing_can_be_written_there_is_no_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert open_wal(tmp_path / "file" / "usage", "a") is None
    assert "lost if this process is killed" in caplog.text


def test_only_this_user_reads_what_was_counted(tmp_path: Path) -> None:
    journal = UsageWal(tmp_path / "usage", "a")
    journal.add(1, KEY, UsageRecord(1))
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "usage").iterdir()}
    assert modes == {"a.lock": 0o600, "a.1.batch": 0o600}
    assert os.stat(tmp_path / "usage").st_mode & 0o077 == 0
    journal.close()
