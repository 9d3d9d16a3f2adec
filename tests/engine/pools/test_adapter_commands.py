"""Unloads, loads and pins: commands about adapters that no request makes, each answered exactly once."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.adapters.card import AdapterRef
from app.engine.errors import AdapterFormatError, EngineFailure, NotReady
from app.engine.request import SamplingParams, TokenChunk
from tests.budgets import examples
from tests.engine.driving import ADAPTERS, Submitted, assert_as_alone, assert_empty, collect, make_engine, run
from tests.fakes import fake_adapter, fake_request


def test_drop_waits_for_sequences_in_flight_and_frees_the_rows() -> None:
    adapter = fake_adapter("dropped", 12)
    engine, _ = make_engine()
    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    engine.submit(fake_request("r", [1, 2, 3], adapter, sampling=sampling), adapter)
    engine.step()
    freed = engine.unload_adapter(adapter.card.digest)
    engine.step()
    assert not freed.done()
    assert engine.stats().num_rank_rows_free == 48
    run(engine)
    assert freed.result(timeout=0) == 16
    assert engine.stats().num_rank_rows_free == 64
    again = engine.unload_adapter(adapter.card.digest)
    engine.step()
    assert again.result(timeout=0) == 0


def test_an_adapter_that_is_loaded_again_before_it_could_be_unloaded_stays() -> None:
    engine, _ = make_engine()
    adapter = ADAPTERS[1]
    digest = adapter.card.digest
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    engine.submit(fake_request("r", [1, 2], adapter, sampling=sampling), adapter)
    engine.step()
    freed = [engine.unload_adapter(digest)]
    engine.step()
    assert not freed[0].done()
    freed.append(engine.unload_adapter(digest))
    loaded = engine.load_adapter(adapter, AdapterRef("it", digest, "t"))
    engine.pin_adapters([digest])
    run(engine)
    assert loaded.result(timeout=0) == 0, "it was there, and nothing was written for it"
    assert [each.result(timeout=0) for each in freed] == [0, 0]
    assert [item.digest for item in engine.stats().residents] == [digest]
    last = engine.unload_adapter(digest)
    run(engine)
    assert last.result(timeout=0) == 8, "a later one is obeyed"


def test_a_pinned_adapter_is_written_before_it_is_asked_for_and_stays() -> None:
    engine, backend = make_engine(rows=32, max_loras=8)
    pinned, others = ADAPTERS[3], [ADAPTERS[1], ADAPTERS[2], ADAPTERS[6], ADAPTERS[7]]
    engine.pin_adapters([pinned.card.digest])
    resident = engine.load_adapter(pinned, AdapterRef("pinned", pinned.card.digest, "acme"))
    assert engine.has_work
    run(engine)
    assert resident.result(timeout=0) == pinned.card.size_bytes
    assert len(backend.writes) == 1
    for index, adapter in enumerate(others * 3):
        submitted = fake_request(f"r{index}", [1, 2], adapter), adapter
        engine.submit(*submitted)
        assert_as_alone(submitted, run(engine)[f"r{index}"])
        assert pinned.card.digest in {item.digest for item in engine.stats().residents}
    before = len(backend.writes)
    engine.submit(fake_request("hit", [3], pinned), pinned)
    run(engine)
    stats = engine.stats()
    assert len(backend.writes) == before == stats.num_adapter_writes
    assert (stats.num_adapter_hits, stats.num_adapter_misses) == (1, 12)
    assert_empty(engine)


def test_what_pinned_adapters_leave_no_room_for_is_refused_and_nobody_else() -> None:
    engine, _ = make_engine(rows=32, max_loras=8)
    pinned, large, small = ADAPTERS[1], ADAPTERS[4], ADAPTERS[6]
    futures = [engine.load_adapter(adapter, AdapterRef("it", adapter.card.digest, "t")) for adapter in (pinned, pinned)]
    engine.pin_adapters([pinned.card.digest])
    for name, adapter in (("large", large), ("small", small), ("large too", large), ("base", None)):
        engine.submit(fake_request(name, [1, 2, 3], adapter), adapter)
    out = run(engine)
    assert all(future.done() for future in futures)
    for name in ("large", "large too"):
        (chunk,) = out[name]
        assert chunk.finish_reason == "error"
        assert isinstance(chunk.error, NotReady)
        assert "32 rank rows: 8 of 32" in str(chunk.error)
        assert "an-adapter" not in str(chunk.error), "the name may be another tenant's"
    for name in ("small", "base"):
        assert out[name][-1].finish_reason in ("stop", "length")
    refused = engine.load_adapter(large, AdapterRef("large", large.card.digest, "t"))
    run(engine)
    with pytest.raises(NotReady, match="32 rank rows"):
        refused.result(timeout=0)
    engine.pin_adapters([])
    engine.submit(fake_request("again", [1], large), large)
    assert run(engine)["again"][-1].finish_reason in ("stop", "length")
    assert_empty(engine)


def test_adapters_that_were_pinned_where_they_lay_leave_room_for_a_large_one() -> None:
    engine, _ = make_engine(rows=64, max_loras=16)
    small = [fake_adapter(f"small{index}", 8) for index in range(8)]
    for index, adapter in enumerate(small):
        engine.submit(fake_request(f"small{index}", [1, 2], adapter), adapter)
        run(engine)
    pinned, large = (small[1], small[6]), fake_adapter("large", 32)
    assert [item.row_start for item in engine.stats().residents if item.digest == pinned[1].card.digest] == [48]
    engine.pin_adapters([adapter.card.digest for adapter in pinned])
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    submitted = [
        (fake_request(f"pinned{index}", [1], adapter, sampling=sampling), adapter)
        for index, adapter in enumerate(pinned)
    ]
    submitted.append((fake_request("large", [1, 2, 3], large), large))
    for request, adapter in submitted:
        engine.submit(request, adapter)
    out = run(engine)
    for each in submitted:
        assert_as_alone(each, out[each[0].request_id])
    digest = pinned[1].card.digest
    loaded = engine.load_adapter(pinned[1], AdapterRef("pinned", digest, "t"))  # by the pin controller
    run(engine)
    assert loaded.result(timeout=0) > 0
    assert [item.row_start for item in engine.stats().residents if item.digest == digest] == [0]
    assert_empty(engine)


def test_a_pinned_adapter_waits_for_sequences_in_flight_only() -> None:
    engine, _ = make_engine(rows=16, max_loras=8)
    busy, pinned = ADAPTERS[3], ADAPTERS[7]
    engine.submit(fake_request("busy", [1], busy, sampling=SamplingParams(max_tokens=6, ignore_eos=True)), busy)
    engine.step()
    engine.pin_adapters([pinned.card.digest])
    resident = engine.load_adapter(pinned, AdapterRef("pinned", pinned.card.digest, "t"))
    engine.submit(fake_request("waits", [1], busy), busy)
    engine.step()
    assert not resident.done()
    out = run(engine)
    assert out["busy"][-1].finish_reason == "length"
    assert resident.result(timeout=0) == pinned.card.size_bytes
    assert [item.digest for item in engine.stats().residents] == [pinned.card.digest]


def test_an_answer_that_nobody_waits_for_does_not_end_the_engine() -> None:
    engine, _ = make_engine()
    adapter = ADAPTERS[1]
    assert engine.unload_adapter(adapter.card.digest).cancel()
    assert engine.load_adapter(adapter, AdapterRef("it", adapter.card.digest, "t")).cancel()
    engine.submit(fake_request("r", [1], adapter), adapter)
    assert run(engine)["r"][-1].finish_reason in ("stop", "length")
    assert engine.unload_adapter(adapter.card.digest).cancel()
    assert engine.load_adapter(adapter, AdapterRef("it", adapter.card.digest, "t")).cancel()
    engine.shut_down(EngineFailure("the end"))


def test_a_pinned_adapter_that_cannot_be_written_is_no_trouble_for_others() -> None:
    engine, backend = make_engine()
    backend.write_error = AdapterFormatError("a broken row")
    adapter = ADAPTERS[1]
    engine.pin_adapters([adapter.card.digest])
    resident = engine.load_adapter(adapter, AdapterRef("it", adapter.card.digest, "t"))
    engine.submit(fake_request("base", [1]))
    assert run(engine)["base"][-1].finish_reason in ("stop", "length")
    with pytest.raises(AdapterFormatError, match="broken row"):
        resident.result(timeout=0)
    assert engine.stats().residents == ()


def ref_of(index: int) -> AdapterRef:
    return AdapterRef("it", ADAPTERS[index].card.digest, "t")


@pytest.mark.parametrize("fails", [True, False])
def test_orders_after_the_engines_end_are_refused_at_once(fails: bool) -> None:
    engine, backend = make_engine()
    if fails:
        backend.fail_at = 0
        engine.submit(fake_request("r", [1]))
        engine.step()
    else:
        engine.shut_down(EngineFailure("the engine was stopped"))
    reason = "on fire" if fails else "was stopped"
    for answer in (engine.unload_adapter("any"), engine.load_adapter(ADAPTERS[1], ref_of(1))):
        with pytest.raises(EngineFailure, match=reason):
            answer.result(timeout=0)
    assert not engine.has_work


def test_orders_that_wait_end_with_the_engine() -> None:
    engine, _ = make_engine(rows=16)
    busy, waiting = ADAPTERS[3], ADAPTERS[7]
    engine.submit(fake_request("busy", [1], busy, sampling=SamplingParams(max_tokens=50, ignore_eos=True)), busy)
    engine.step()
    taken = [engine.unload_adapter(busy.card.digest), engine.load_adapter(waiting, ref_of(7))]
    engine.step()
    assert not any(answer.done() for answer in taken)
    in_the_inbox = [engine.unload_adapter(busy.card.digest), engine.load_adapter(waiting, ref_of(7))]
    (last,) = engine.shut_down(EngineFailure("the engine was stopped"))
    for answer in taken + in_the_inbox:
        with pytest.raises(EngineFailure, match="was stopped"):
            answer.result(timeout=0)
    assert last.request_id == "busy"


def test_orders_that_race_with_the_end_are_answered_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stops between an order's way into the inbox and the look at whether it still runs."""
    engine, _ = make_engine()

    class Inbox(deque):  # type: ignore[type-arg]
        def append(self, item: Any) -> None:
            super().append(item)
            engine.shut_down(EngineFailure("the engine was stopped"))

    monkeypatch.setattr(engine, "_inbox", Inbox())
    for answer in (engine.unload_adapter("any"), engine.load_adapter(ADAPTERS[1], ref_of(1))):
        with pytest.raises(EngineFailure, match="was stopped"):
            answer.result(timeout=0)


def test_orders_of_many_threads_at_the_end_are_all_answered() -> None:
    engine, _ = make_engine()
    answers: list[Any] = []
    begun = threading.Barrier(5)

    def order() -> None:
        begun.wait(120)
        for _ in range(200):
            answers.append(engine.unload_adapter("any"))
            answers.append(engine.load_adapter(ADAPTERS[1], ref_of(1)))

    threads = [threading.Thread(target=order) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(120)
    engine.step()
    engine.shut_down(EngineFailure("the engine was stopped"))
    for thread in threads:
        thread.join(120)
    assert len(answers) == 1600
    assert all(answer.done() for answer in answers)


#: Submit, abort, unload, load: an index of ADAPTERS (None: the base). Keep: several of them. Step: how many.
EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from([None, *range(len(ADAPTERS))])),
    st.tuples(st.just("submit"), st.sampled_from([None, *range(len(ADAPTERS))])),
    st.tuples(st.just("abort"), st.integers(0, 40)),
    st.tuples(st.sampled_from(["unload", "load"]), st.integers(0, len(ADAPTERS) - 1)),
    st.tuples(st.just("keep"), st.frozensets(st.integers(0, len(ADAPTERS) - 1), max_size=3)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    events=st.lists(EVENTS, min_size=1, max_size=40),
    rows=st.sampled_from([32, 48, 64]),
    slots=st.integers(2, 6),
    write_bytes=st.sampled_from([1, 10_000]),
    max_sequences=st.integers(1, 4),
)
def test_orders_in_any_batch_end_and_nothing_is_left(
    events: list[tuple[str, Any]], rows: int, slots: int, write_bytes: int, max_sequences: int
) -> None:
    engine, _ = make_engine(
        rows=rows,
        max_loras=slots,
        lora_load_bytes_per_step=write_bytes,
        max_num_seqs=max_sequences,
    )
    submitted: dict[str, Submitted] = {}
    out: dict[str, list[TokenChunk]] = {}
    answers: list[Any] = []
    for number, (what, which) in enumerate(events):
        if what == "submit":
            adapter = None if which is None else ADAPTERS[which]
            sampling = SamplingParams(max_tokens=1 + number % 9, temperature=0.0)
            request = fake_request(f"r{number}", [number % 60, 3, 5], adapter, sampling=sampling)
            engine.submit(request, adapter)
            submitted[request.request_id] = (request, adapter)
        elif what == "abort":
            engine.abort(f"r{which}")
        elif what == "unload":
            answers.append(engine.unload_adapter(ADAPTERS[which].card.digest))
        elif what == "load":
            answers.append(engine.load_adapter(ADAPTERS[which], ref_of(which)))
        elif what == "keep":
            engine.pin_adapters([ADAPTERS[index].card.digest for index in which])
        else:
            for _ in range(which):
                collect(out, engine.step())
                engine.check()
    for request_id, chunks in run(engine).items():
        out.setdefault(request_id, []).extend(chunks)
    assert engine.failure is None
    assert all(answer.done() for answer in answers)
    assert all(isinstance(answer.exception(), NotReady | None) for answer in answers), "pinned ones leave no room"
    assert set(out) == set(submitted)
    for request_id, chunks in out.items():
        if chunks[-1].finish_reason == "error":
            assert isinstance(chunks[-1].error, NotReady), "pinned ones leave no room"
        elif chunks[-1].finish_reason != "abort":
            assert_as_alone(submitted[request_id], chunks)
    assert_empty(engine)
