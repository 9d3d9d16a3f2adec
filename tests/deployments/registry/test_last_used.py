"""Use is written down rarely, together, and never backwards."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from sqlalchemy import event, text

from app.deployments.registry import last_used
from app.deployments.registry.last_used import LastUsed
from app.deployments.registry.registry import Registry
from app.engine.errors import NotReady
from tests.deployments.managed import ADA, MINE, register


async def test_what_many_replicas_tell_is_one_write() -> None:
    writes: list[Mapping[str, float]] = []
    book = LastUsed(writes.append)
    for second in range(30):
        for replica in range(32):
            book.note({f"d{(replica + second) % 40}": float(second), "everywhere": float(replica)})
    assert book.last_s("everywhere") == 31.0
    assert book.last_s("nobody's") is None
    await book.write()
    await book.write()
    (written,) = writes
    assert len(written) == 41, "as many as were used"
    assert book.last_s("everywhere") is None


async def test_what_the_database_did_not_take_is_written_with_the_next() -> None:
    is_away, writes = True, []

    def write(last_used_s: Mapping[str, float]) -> None:
        if is_away:
            raise NotReady("away")
        writes.append(dict(last_used_s))

    book = LastUsed(write)
    book.note({"a": 5.0, "b": 1.0})
    with pytest.raises(NotReady):
        await book.write()
    book.note({"a": 3.0, "c": 4.0})
    is_away = False
    await book.write()
    assert writes == [{"a": 5.0, "b": 1.0, "c": 4.0}]


def test_an_outage_does_not_make_it_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_used, "MAX_UNWRITTEN", 100)
    book = LastUsed(lambda _: None)
    for number in range(10_000):
        book.note({f"d{number}": float(number)})
    assert len(book._last_s) <= 100
    assert book.last_s("d9999") == 9999.0


def test_what_is_written_is_proportional_to_what_was_used(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_used, "_QUERY_BATCH", 7)
    for index in range(20):
        register(registry.catalog, f"n{index}", "/", f"d{index}", max_rank=1, size_bytes=1, **ADA)
    statements = []
    event.listen(
        registry.database._engine, "before_cursor_execute", lambda *args: statements.append((args[2], args[3]))
    )
    registry.catalog.note_use({f"d{index}": float(index) for index in range(100)})
    changes = [(statement, rows) for statement, rows in statements if statement.startswith(("INSERT", "UPDATE"))]
    assert sum(len(rows) for _, rows in changes) == 20, "one row for each that a name means, none for others"
    assert all("uses" in statement for statement, _ in changes)


def test_contents_that_no_name_means_are_forgotten(registry: Registry) -> None:
    for name, digest in (("a", "d1"), ("twin", "d1"), ("b", "d2")):
        register(registry.catalog, name, "/", digest, max_rank=1, size_bytes=1, **ADA)
    registry.catalog.note_use({"d1": 1.0, "d2": 2.0})

    def storage() -> set[str]:
        with registry.database.read() as connection:
            query = text("SELECT digest FROM uses WHERE base_digest = :base")
            return set(connection.scalars(query.bindparams(base=registry.database.base_digest)))

    registry.catalog.finish_unload(registry.catalog.begin_unload("a", **ADA).job)
    assert storage() == {"d1", "d2"}
    register(registry.catalog, "b", "/", "d3", max_rank=1, size_bytes=1, **ADA)
    assert storage() == {"d1"}
    registry.catalog.finish_unload(registry.catalog.begin_unload("twin", **ADA).job)
    assert storage() == set()
    entry = registry.catalog.get("b", **MINE)
    assert entry is not None
    assert entry.last_used_s is None
