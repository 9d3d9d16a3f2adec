"""Jobs, events and the audit: what was asked, what happened, found again by the next process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.deployments.registry.jobs.job_table import MAX_JOBS_PER_NAME
from app.deployments.registry.models import State
from app.deployments.registry.registry import Registry
from app.engine.errors import InvalidRequest
from tests.deployments.managed import MINE, register, wanted


def test_a_job_is_found_again_as_it_was_left(registry: Registry, open_again: Callable[[], Registry]) -> None:
    one = registry.jobs.create(wanted("a", "/a", pinned=True, traffic_weight=2.0))
    two = registry.jobs.create(wanted("b", "/b"))
    one = registry.jobs.advance(one, State.DOWNLOADING)
    two = registry.jobs.advance(two, State.FAILED, reason="tensor 'x' has NaN")
    after = open_again().jobs
    assert after.get(one.id, **MINE) == one == after.latest("a", **MINE)
    assert after.unfinished_jobs("load") == [one]
    assert after.get(two.id, **MINE) == two
    assert (two.state, two.reason) == (State.FAILED, "tensor 'x' has NaN")
    done = after.advance(one, State.LOADED, generation=3, digest="d")
    assert after.get(one.id, **MINE) == done
    assert (done.generation, done.pinned, done.traffic_weight, done.requested_by) == (3, True, 2.0, "ada")
    assert after.unfinished_jobs("load") == []
    assert after.get("absent", **MINE) is None
    assert after.get(one.id, tenant_id="bob") is None
    assert after.latest("absent", **MINE) is None


def test_a_name_keeps_its_last_jobs_and_all_unfinished_ones(registry: Registry) -> None:
    first = registry.jobs.create(wanted("a", "/a"))
    failed = [
        registry.jobs.advance(registry.jobs.create(wanted("a", "/a")), State.FAILED)
        for _ in range(MAX_JOBS_PER_NAME + 2)
    ]
    storage = [job for job in failed if registry.jobs.get(job.id, **MINE)]
    assert storage[0] is not failed[0]
    assert MAX_JOBS_PER_NAME - 1 <= len(storage) <= MAX_JOBS_PER_NAME
    assert registry.jobs.unfinished_jobs("load") == [first]


def test_the_journal_tells_what_happened_and_who_asked(registry: Registry) -> None:
    job = registry.jobs.create(wanted("a", "/a"))
    for state in (State.DOWNLOADING, State.VALIDATING, State.ON_DISK, State.ON_HOST):
        job = registry.jobs.advance(job, state)
    register(registry.catalog, "a", "/a", "d", max_rank=1, size_bytes=1, who="ada", **MINE)
    registry.jobs.advance(job, State.LOADED, generation=1, digest="d")
    registry.catalog.configure("a", pinned=True, who="bob", **MINE)
    registry.aliases.put("x", {"a": 1}, who="bob", **MINE)
    registry.aliases.remove("x", who="bob", **MINE)
    registry.catalog.finish_unload(registry.catalog.begin_unload("a", who="eve", **MINE).job)
    events = registry.event_log.events("a", **MINE)
    assert [event.event for event in reversed(events)] == [
        "requested", "downloading", "validating", "downloaded to disk", "loaded to host", "registered", "routable",
        "pinned", "draining", "removed",
    ]  # fmt: skip
    assert events[2].generation == 1
    assert [(record.who, record.action) for record in reversed(registry.event_log.audit(**MINE))] == [
        ("ada", "request load"), ("ada", "load"), ("bob", "configure"), ("bob", "put alias"), ("bob", "remove alias"),
        ("eve", "unload"),
    ]  # fmt: skip
    first = registry.event_log.events("a", limit=4, **MINE)
    assert first + registry.event_log.events("a", before=first[-1].id, **MINE) == events
    assert registry.event_log.events("absent", **MINE) == registry.event_log.events("a", tenant_id="bob") == []


def test_words_that_a_database_cannot_keep(registry: Registry) -> None:
    job = registry.jobs.create(wanted("a", "/a"))
    reason = "header has \0 and \ud800" + "x" * 5000
    done = registry.jobs.advance(job, State.FAILED, reason=reason)
    assert registry.jobs.get(job.id, **MINE) == done
    assert done.reason is not None
    assert done.reason.startswith("header has \N{REPLACEMENT CHARACTER} and ?xx")
    assert len(done.reason) == 2000
    with pytest.raises(InvalidRequest, match="characters"):
        registry.jobs.create(wanted("a", "half a surrogate: \ud800"))
    for call in (registry.jobs.get, registry.jobs.latest, registry.catalog.get, registry.event_log.events):
        with pytest.raises(InvalidRequest, match="characters"):
            call("\ud800", **MINE)
