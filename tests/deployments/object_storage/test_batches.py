"""Leases of batches between machines whose clocks are set: whoever works keeps its batch, whoever died loses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.deployments.object_storage.batches import LEASE_S, MAX_PER_TENANT
from app.deployments.object_storage.files import ARRIVAL_S
from app.deployments.object_storage.models import Batch, LeaseLost, LineResult, NewBatch, StorageQuotaExceeded
from app.deployments.object_storage.storage import Storage
from app.deployments.registry.db.database import Database, sqlite_url

DAY_S = 86_400.0
#: How often ingresses ask whether there is work, and write down what they have.
POLL_S = 3.0


class Machines:
    """Each opens the books of one database. `now_s` is what passes for all of them; their clocks may be set wrong."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened: list[Database] = []
        self.now_s = 1_000_000.0

    def open(self, wrong_by_s: Callable[[], float]) -> Storage:
        self._opened.append(Database(self._url, "base", lambda: self.now_s + wrong_by_s()))
        return Storage(self._opened[-1], lambda: self.now_s - 1_000_000.0)

    def close(self) -> None:
        for database in self._opened:
            database.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    opened = Machines(sqlite_url(tmp_path / "registry.sqlite"))
    yield opened
    opened.close()


def new_batch(books: Storage, tenant_id: str = "t") -> Batch:
    file = books.files.begin(tenant_id, "in.jsonl", "batch", 3, 30 * DAY_S, 1 << 20)
    books.files.add_part(file.id, 0, b"{}\n")
    books.files.end(file.id, 1, tenant_id=tenant_id)
    return books.batches.create(
        NewBatch(tenant_id, "", "/v1/completions", file.id, DAY_S, 30 * DAY_S, max_open=9, max_bytes=1 << 20)
    )


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 90_000.0])
@pytest.mark.parametrize("whose", ["the worker's", "the other's"])
def test_a_clock_that_is_set_takes_no_batch_from_the_living_and_leaves_the_dead_none(
    machines: Machines, whose: str, step_s: float
) -> None:
    wrong_by_s = {"the worker's": 0.0, "the other's": 0.0}
    working = machines.open(lambda: wrong_by_s["the worker's"]).batches
    other_books = machines.open(lambda: wrong_by_s["the other's"])
    other, batch = other_books.batches, new_batch(other_books)
    assert working.claim("worker") == batch
    assert other.claim("other") is None
    wrong_by_s[whose] += step_s
    late = machines.open(lambda: step_s).batches  # it has never seen the batch, and starts with a wrong clock
    for _ in range(int(3 * LEASE_S / POLL_S)):
        assert [books.claim("other") for books in (other, late, working)] == [None] * 3
        machines.now_s += POLL_S
        working.answer(batch.id, "worker", [], 1 << 20)
    assert [books.claim("other") for books in (late, other)] == [None] * 2, "its last word counts from here"
    machines.now_s += LEASE_S - 1.0
    assert [books.claim("other") for books in (late, other)] == [None] * 2
    machines.now_s += 1.0
    assert other.claim("other") == batch
    assert [books.claim("late") for books in (late, working)] == [None] * 2, "it is one's only"
    with pytest.raises(LeaseLost):
        working.answer(batch.id, "worker", [], 1 << 20)


def test_a_batch_s_answers_count_against_its_tenant_as_they_are_written(machines: Machines) -> None:
    storage = machines.open(lambda: 0.0)
    batch = new_batch(storage)
    batches, claimed = storage.batches, storage.batches.claim("worker")
    assert claimed == batch
    batches.begin(batch.id, "worker", 300)
    batches.answer(batch.id, "worker", [LineResult(0, False, "x" * 99), LineResult(1, True, "y" * 49)], 1000)
    batches.answer(batch.id, "worker", [LineResult(299, False, "z" * 799)], 1000)
    with pytest.raises(StorageQuotaExceeded, match="the batch's answers have 100 bytes but 47 are left"):
        batches.answer(batch.id, "worker", [LineResult(2, False, "x" * 99)], 1000)
    with pytest.raises(StorageQuotaExceeded, match="47 are left"):
        storage.files.begin("t", "more.jsonl", "batch", 48, DAY_S, 1000)
    storage.files.begin("other", "theirs.jsonl", "batch", 48, DAY_S, 1000)
    machines.now_s += 2 * ARRIVAL_S
    storage.sweep()
    assert storage.files.page(tenant_id="t", limit=9, after=None, purpose="batch_output", newest=True).files == ()
    ended = batches.finish(batch.id, "worker", "failed")
    assert ended.output_file_id is not None
    output = storage.files.get(ended.output_file_id, tenant_id="t")
    assert (output.size_bytes, output.filename) == (900, f"{batch.id}_output.jsonl")
    parts = [storage.files.part(output.id, number, tenant_id="t") for number in range(3)]
    assert parts == [b"x" * 99 + b"\n", b"z" * 799 + b"\n", None]
    full = NewBatch("t", "", "/v1/completions", batch.input_file_id, DAY_S, DAY_S, max_open=9, max_bytes=953)
    with pytest.raises(StorageQuotaExceeded, match="a batch's output has at least"):
        batches.create(full)
    for file_id in (output.id, str(ended.error_file_id)):
        storage.files.delete(file_id, tenant_id="t")
    assert batches.answered_lines(batch.id) == []


def test_what_is_left_by_its_process_is_free_at_once(machines: Machines) -> None:
    one, other = (machines.open(lambda: 0.0) for _ in range(2))
    batch = new_batch(one)
    assert one.batches.claim("one") == batch
    assert other.batches.claim("other") is None
    one.batches.release("one")
    assert other.batches.claim("other") == batch


def test_a_tenant_s_batches_do_not_take_every_place_of_a_process(machines: Machines) -> None:
    storage = machines.open(lambda: 0.0)
    floods = sorted((new_batch(storage) for _ in range(MAX_PER_TENANT + 1)), key=lambda batch: batch.id)
    claimed = [storage.batches.claim("worker") for _ in range(MAX_PER_TENANT + 1)]
    assert claimed == [*floods[:-1], None]
    late = new_batch(storage, "other")
    assert storage.batches.claim("worker") == late
    assert storage.batches.claim("worker") is None
    assert storage.batches.claim("another worker") == floods[-1], "it has room"
    storage.batches.finish(floods[0].id, "worker", "completed")
    more = new_batch(storage)
    assert storage.batches.claim("worker") == more


@pytest.mark.parametrize("begins", [True, False], ids=["", "it is cancelled before its lines are counted"])
def test_an_output_has_every_line_though_others_of_the_input_are_empty(machines: Machines, begins: bool) -> None:
    storage = machines.open(lambda: 0.0)
    batch = new_batch(storage)
    assert storage.batches.claim("worker") == batch
    if begins:
        storage.batches.begin(batch.id, "worker", 300)
    numbers = range(0, 600, 2)
    storage.batches.answer(batch.id, "worker", [LineResult(each, False, str(each)) for each in numbers], 1 << 20)
    ended = storage.batches.finish(batch.id, "worker", "completed" if begins else "cancelled")
    output = storage.files.get(str(ended.output_file_id), tenant_id="t")
    parts = [storage.files.part(output.id, number, tenant_id="t") for number in range(4)]
    content = b"".join(part for part in parts if part is not None)
    assert content == b"".join(b"%d\n" % each for each in numbers)
    assert len(content) == output.size_bytes
