"""The engine over the fake backend: every request gets the tokens it would get alone."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.adapters.adapter import LoraAdapter
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine, _RefuseWaiting
from app.engine.errors import (
    AdapterFormatError,
    AdapterMismatch,
    AdapterOverflow,
    AdapterTooLarge,
    ConfigError,
    ContextOverflow,
    EngineFailure,
    InvalidRequest,
    QueueFull,
)
from app.engine.request import GenerateRequest, SamplingParams, TokenChunk
from app.engine.sequence import Sequence
from tests.budgets import examples
from tests.engine.driving import (
    ADAPTERS,
    Submitted,
    assert_as_alone,
    assert_empty,
    assert_told,
    collect,
    make_engine,
    run,
    tokens_of,
)
from tests.fakes import EOS, VOCAB, FakeBackend, fake_adapter, fake_request, fake_tokens


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    prompt_logprobs = draw(st.sampled_from([None, None, 0, 2]))
    return SamplingParams(
        prompt_logprobs=prompt_logprobs,
        max_tokens=draw(st.integers(1 if prompt_logprobs is None else 0, 24)),
        temperature=draw(st.sampled_from([0.0, 0.7])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        top_k=draw(st.sampled_from([0, 5])),
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
        ignore_eos=draw(st.booleans()),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        num_logprobs=draw(st.sampled_from([None, None, 0, 2])),
    )


@st.composite
def scripts(draw: st.DrawFn) -> tuple[dict[str, float | bool], list[tuple[str, object]]]:
    """A configuration and what happens: submits, aborts, unloads, steps."""
    config: dict[str, float | bool] = {
        "num_kv_blocks": draw(st.integers(9, 24)),
        "rows": draw(st.sampled_from([32, 48, 64])),
        "max_loras": draw(st.integers(2, 6)),
        "max_num_batched_tokens": draw(st.integers(8, 40)),
        "target_step_ms": draw(st.sampled_from([0, 5, 50])),
        "max_tenant_slowdown": draw(st.sampled_from([0.0, 1.0, 1.5])),
        "max_num_seqs": draw(st.integers(1, 8)),
        "lora_load_bytes_per_step": draw(st.sampled_from([1, 200, 10_000])),
        "enable_prefix_caching": draw(st.booleans()),
    }
    prefixes = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=3))
    events: list[tuple[str, object]] = []
    for index in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from(["submit"] * 6 + ["abort", "unload", "step", "step"]))
        if kind == "submit":
            adapter = draw(st.sampled_from([None, None, *ADAPTERS]))
            invocation = draw(st.sampled_from([[], list(adapter.card.invocation_tokens)])) if adapter else []
            tail = draw(st.lists(st.integers(0, VOCAB - 1), max_size=12))
            prompt = draw(st.sampled_from(prefixes)) + invocation + tail
            request = fake_request(
                f"r{index}",
                prompt,
                adapter,
                sampling=draw(sampling_params()),
                tenant_id=draw(st.sampled_from(["x", "y", "z"])),
                weight=draw(st.sampled_from([1.0, 2.5])),
                cache_salt=draw(st.sampled_from([b"", b"salt"])),
            )
            events.append(("submit", (request, adapter)))
        elif kind == "abort":
            events.append(("abort", f"r{draw(st.integers(0, index))}"))
        elif kind == "unload":
            events.append(("unload", draw(st.sampled_from(ADAPTERS)).card.digest))
        else:
            events.append(("step", draw(st.integers(1, 6))))
    return config, events


@settings(max_examples=examples(150), deadline=None)
@given(scripts())
def test_any_company_gives_the_tokens_of_being_alone(
    script: tuple[dict[str, float | bool], list[tuple[str, object]]],
) -> None:
    config, events = script
    ticks = itertools.count()
    engine, _ = make_engine(clock=lambda: 0.01 * next(ticks), **config)  # type: ignore[arg-type]
    submitted: dict[str, Submitted] = {}
    aborted: set[str] = set()
    out: dict[str, list[TokenChunk]] = {}
    unloads = []
    for kind, value in events:
        match kind, value:
            case "submit", (GenerateRequest() as request, adapter):
                engine.submit(request, adapter)
                submitted[request.request_id] = (request, adapter)
            case "abort", str(request_id):
                engine.abort(request_id)
                aborted.add(request_id)
            case "unload", str(digest):
                unloads.append(engine.unload_adapter(digest))
            case "step", int(count):
                for _ in range(count):
                    collect(out, engine.step())
                    engine.check()
    for chunks in run(engine).values():
        collect(out, chunks)
    assert set(out) == set(submitted)
    for request_id, chunks in out.items():
        if chunks[-1].finish_reason == "abort":
            assert request_id in aborted
            expected = [line.token_id for line in fake_tokens(*submitted[request_id])]
            assert tokens_of(chunks) == expected[: len(tokens_of(chunks))]
        else:
            assert_as_alone(submitted[request_id], chunks)
    assert all(freed.done() for freed in unloads)
    assert_empty(engine)
    assert_told(engine, out)


def test_one_request_through_prefill_and_decode() -> None:
    engine, backend = make_engine(max_num_batched_tokens=8)
    backend.keep_batches = True
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, num_logprobs=2)
    request = fake_request("r", list(range(20)), sampling=sampling)
    engine.submit(request)
    out = run(engine)
    assert_as_alone((request, None), out["r"])
    assert [len(batch.token_ids) for batch in backend.batches] == [8, 8, 4, 1, 1, 1, 1]
    assert len(out["r"]) == 5
    assert_empty(engine)


def test_resumed_request_continues_with_the_tokens_it_would_have_had() -> None:
    adapter = fake_adapter("resumed", 8)
    sampling = SamplingParams(max_tokens=20, temperature=0.8, seed=99, ignore_eos=True, frequency_penalty=0.3)
    whole = fake_request("whole", [3, 1, 4, 1, 5], adapter, sampling=sampling)
    expected = [line.token_id for line in fake_tokens(whole, adapter)]
    for sent in range(1, 20):
        engine, _ = make_engine()
        rest = fake_request("rest", whole.token_ids, adapter, sampling=sampling, resume_token_ids=expected[:sent])
        engine.submit(rest, adapter)
        chunks = run(engine)["rest"]
        assert tokens_of(chunks) == expected[sent:]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 20


@pytest.mark.parametrize(("resumed", "reason"), [([1, 2, 3], "length"), ([1, EOS], "stop")])
def test_a_request_resumed_after_its_end_is_answered_without_computing(resumed: list[int], reason: str) -> None:
    engine, backend = make_engine()
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    engine.submit(fake_request("r", [1, 2], sampling=sampling, resume_token_ids=resumed))
    (chunk,) = engine.step()
    assert (chunk.token_ids, chunk.finish_reason) == ((), reason)
    assert chunk.matched_stop == (EOS if reason == "stop" else None)
    assert backend.num_forwards == 0
    assert not engine.has_work


def test_preemption_happens_and_changes_nothing() -> None:
    engine, _ = make_engine(num_kv_blocks=9, max_num_seqs=8)
    sampling = SamplingParams(max_tokens=40, temperature=0.9, seed=5, ignore_eos=True)
    requests = [fake_request(f"r{i}", [i, i + 1, i + 2], sampling=sampling) for i in range(6)]
    for request in requests:
        engine.submit(request)
    out = run(engine)
    assert engine.stats().num_preemptions > 0
    for request in requests:
        assert_as_alone((request, None), out[request.request_id])
    assert_empty(engine)


def test_prefix_is_shared_only_within_adapter_and_salt() -> None:
    adapter, twin = fake_adapter("one", 8), fake_adapter("two", 8)
    prompt = list(range(33))
    engine, _ = make_engine()
    cached = {}
    cases: list[tuple[str, LoraAdapter | None, bytes]] = [
        ("first", adapter, b""),
        ("same", adapter, b""),
        ("salted", adapter, b"s"),
        ("other adapter", twin, b""),
        ("base", None, b""),
        ("salted again", adapter, b"s"),
        ("base again", None, b""),
    ]
    for name, used, salt in cases:
        request = fake_request(name, prompt, used, cache_salt=salt)
        engine.submit(request, used)
        chunks = run(engine)[name]
        assert_as_alone((request, used), chunks)
        assert chunks[-1].usage is not None
        cached[name] = chunks[-1].usage.cached_tokens
    assert cached == {
        "first": 0,
        "same": 32,
        "salted": 0,
        "other adapter": 0,
        "base": 0,
        "salted again": 32,
        "base again": 32,
    }
    assert engine.stats().num_cached_tokens == 96


def test_last_prompt_token_is_always_computed() -> None:
    engine, backend = make_engine()
    for name in ("a", "b"):
        engine.submit(fake_request(name, list(range(32)), sampling=SamplingParams(max_tokens=1, temperature=0.0)))
        backend.keep_batches = True
        chunks = run(engine)[name]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.cached_tokens == 24
    assert [len(batch.token_ids) for batch in backend.batches] == [32, 8]


def test_more_adapters_than_rows_all_get_their_turn() -> None:
    engine, _ = make_engine(rows=32, max_loras=4)
    adapters = [fake_adapter(f"m{i}", (4, 8, 16, 32)[i % 4]) for i in range(24)]
    submitted: dict[str, Submitted] = {}
    for round_ in range(3):
        for index, adapter in enumerate(adapters):
            request = fake_request(f"{round_}/{index}", [index, round_, 3], adapter)
            engine.submit(request, adapter)
            submitted[request.request_id] = (request, adapter)
    out = run(engine)
    for request_id, chunks in out.items():
        assert_as_alone(submitted[request_id], chunks)
    assert set(out) == set(submitted)
    assert engine.stats().num_adapter_evictions > 0
    assert_empty(engine)


def test_abort_gives_everything_back_within_a_step() -> None:
    adapter = fake_adapter("aborted", 8)
    engine, _ = make_engine()
    sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    engine.submit(fake_request("running", list(range(30)), adapter, sampling=sampling), adapter)
    engine.step()
    assert engine.stats().residents[0].num_refs == 1
    engine.abort("running")
    engine.abort("unknown")
    (chunk,) = engine.step()
    assert (chunk.request_id, chunk.finish_reason, chunk.token_ids) == ("running", "abort", ())
    assert_empty(engine)
    engine.submit(fake_request("running", [1]))
    engine.abort("running")
    assert [c.finish_reason for c in engine.step()] == ["abort"]


def test_a_failing_backend_ends_every_stream_with_its_error() -> None:
    engine, backend = make_engine(max_num_seqs=2)
    backend.fail_at = 3
    sampling = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    for index in range(5):
        engine.submit(fake_request(f"r{index}", [index], sampling=sampling))
    pending = engine.unload_adapter("unused")
    out: dict[str, list[TokenChunk]] = {}
    while engine.has_work:
        collect(out, engine.step())
    assert pending.result(timeout=0) == 0
    assert {chunks[-1].finish_reason for chunks in out.values()} == {"error"}
    assert len(out) == 5
    error = out["r0"][-1].error
    assert isinstance(error, EngineFailure)
    assert "the fake device is on fire" in str(error)
    assert error.computing == {"r0", "r1"}, "not those that waited"
    assert engine.failure is error
    with pytest.raises(EngineFailure, match="on fire"):
        engine.submit(fake_request("late", [1]))


def test_a_submit_that_races_with_the_failure_is_answered_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend fails between the check and the inbox, before or after the request is known."""
    for fails_first in (True, False):
        engine, backend = make_engine()
        backend.fail_at = 0
        engine.submit(fake_request("earlier", [1]))
        answered: list[TokenChunk] = []

        def build(*parts: Any, engine: Engine = engine, answered: list[TokenChunk] = answered) -> Sequence:
            answered += engine.step()
            return Sequence(*parts)

        class Inbox(deque):  # type: ignore[type-arg]
            def append(self, item: Any, engine: Engine = engine, answered: list[TokenChunk] = answered) -> None:
                super().append(item)
                answered += engine.step()

        with monkeypatch.context() as patch:
            if fails_first:
                patch.setattr("app.engine.engine.Sequence", build)
                with pytest.raises(EngineFailure):
                    engine.submit(fake_request("racing", [1]))
            else:
                patch.setattr(engine, "_inbox", Inbox(engine._inbox))
                engine.submit(fake_request("racing", [1]))
        answered += engine.step()
        expected = ["earlier"] if fails_first else ["earlier", "racing"]
        assert [chunk.request_id for chunk in answered] == expected
        assert not engine.has_work


def test_an_adapter_that_cannot_be_written_fails_only_its_own_requests() -> None:
    good, bad = fake_adapter("good", 8), fake_adapter("bad", 8)
    engine, backend = make_engine()
    submitted = {"good": (fake_request("good", [1, 2], good), good), "base": (fake_request("base", [1, 2]), None)}
    engine.submit(*submitted["good"])
    out: dict[str, list[TokenChunk]] = {}
    collect(out, engine.step())
    backend.write_error = AdapterFormatError("layer 0 q_proj has the wrong shape")
    engine.submit(fake_request("bad", [1, 2], bad), bad)
    engine.submit(*submitted["base"])
    for chunks in run(engine).values():
        collect(out, chunks)
    assert out["bad"][-1].finish_reason == "error"
    assert isinstance(out["bad"][-1].error, AdapterFormatError)
    for name, pair in submitted.items():
        assert_as_alone(pair, out[name])
    stats = engine.stats()
    assert [resident.digest for resident in stats.residents] == [good.card.digest]
    assert (stats.num_adapter_writes, stats.num_adapter_write_bytes) == (1, good.card.size_bytes)
    assert_empty(engine)


def test_whose_output_overflows_ends_alone() -> None:
    good, bad = fake_adapter("good", 8), fake_adapter("bad", 8)
    engine, backend = make_engine(max_num_batched_tokens=16)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    submitted: dict[str, Submitted] = {}
    for name, adapter in (("bad", bad), ("good", good), ("bad too", bad), ("base", None)):
        submitted[name] = fake_request(name, [1, 2] * 12, adapter, sampling=sampling), adapter
        engine.submit(*submitted[name])
    backend.overflowing = {1}
    out = run(engine)
    for name in ("bad", "bad too"):
        (chunk,) = out[name]
        assert isinstance(chunk.error, AdapterOverflow)
        assert "after 24 tokens" in str(chunk.error)
    for name in ("good", "base"):
        assert_as_alone(submitted[name], out[name])
    assert_empty(engine)
    backend.overflowing = {0}
    engine.submit(*submitted["base"])
    (chunk,) = run(engine)["base"]
    assert isinstance(chunk.error, EngineFailure)
    assert engine.failure is None, "it is this request's"


def test_an_idle_engine_holds_no_adapter_that_was_dropped() -> None:
    engine, backend = make_engine()
    adapter = fake_adapter("a", 8)
    engine.submit(fake_request("r", [1, 2], adapter), adapter)
    run(engine)
    freed = engine.unload_adapter(adapter.card.digest)
    run(engine)
    assert freed.result(timeout=0) == 8
    backend.prepared.clear()
    held = weakref.ref(adapter)
    del adapter
    gc.collect()
    assert held() is None


def test_an_adapter_is_not_prepared_again_while_it_is_resident() -> None:
    """A service that has unmapped it and fetched it again gives the engine another object with the same contents."""
    engine, backend = make_engine()
    for index, num_prepared in enumerate((1, 1, 2)):
        adapter = fake_adapter("a", 8)
        pair = (fake_request(f"r{index}", [index, 2], adapter), adapter)
        engine.submit(*pair)
        assert len(backend.prepared) == num_prepared
        assert_as_alone(pair, run(engine)[f"r{index}"])
        if index == 1:
            freed = engine.unload_adapter(adapter.card.digest)
            engine.step()
            assert freed.result(timeout=0) == 8


def test_refusals_name_value_limit_and_way_out() -> None:
    engine, _ = make_engine(max_model_len=32, max_queued_requests=2, rows=24)
    with pytest.raises(ContextOverflow, match=r"20 tokens.*max_tokens is 16.*36.*32"):
        engine.submit(fake_request("r", [1] * 20))
    large, foreign = fake_adapter("large", 17), fake_adapter("foreign", 8, base_digest="other-base")
    with pytest.raises(AdapterTooLarge, match=r"needs 17 rank rows.*at most 16.*lora_pool_rows"):
        engine.submit(fake_request("r", [1], large), large)
    with pytest.raises(AdapterMismatch, match="other-base"):
        engine.submit(fake_request("r", [1], foreign), foreign)
    with pytest.raises(InvalidRequest, match="weights given are none"):
        engine.submit(fake_request("r", [1], fake_adapter("absent", 8)))
    assert not engine.has_work
    engine.submit(fake_request("r", [1]))
    with pytest.raises(InvalidRequest, match="'r' is already in use"):
        engine.submit(fake_request("r", [1]))
    engine.submit(fake_request("s", [1]))
    with pytest.raises(
        QueueFull, match=r"engine.max_queued_requests is 2, which is reached; 2 are in use by this project"
    ):
        engine.submit(fake_request("t", [1]))
    run(engine)
    engine.submit(fake_request("r", [1]))
    with pytest.raises(ConfigError, match="max_model_len is 513"):
        make_engine(max_model_len=513)


def test_a_flood_of_many_sequences_leaves_places_to_others() -> None:
    engine, _ = make_engine(max_queued_requests=512, max_num_seqs=4)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for number in range(512):  # eight requests with n=64
        engine.submit(fake_request(f"flood{number}", [1, 2], tenant_id="flood", sampling=sampling))
    with pytest.raises(QueueFull, match="512 are in use by this project"):
        engine.submit(fake_request("flood512", [1, 2], tenant_id="flood"))
    engine.submit(fake_request("victim", [3], tenant_id="victim", sampling=sampling))
    out = run(engine)
    refused = [name for name, chunks in out.items() if isinstance(chunks[-1].error, QueueFull)]
    assert refused == ["flood511"], "the newest of the tenant with the most"
    assert len(tokens_of(out["victim"])) == 2
    assert_empty(engine)


def test_only_a_request_that_still_waits_gives_way_and_the_others_hold_no_place() -> None:
    engine, _ = make_engine(max_queued_requests=2, max_num_seqs=1)
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    for number in range(2):
        engine.submit(fake_request(f"a{number}", [1, 2], tenant_id="a", sampling=sampling))
    chunks = engine.step()
    engine.submit(fake_request("a2", [1], tenant_id="a", sampling=sampling))
    assert len(engine._waiting) == 2, "the first is running"
    for request_id in ("a0", "gone"):
        engine._inbox.append(_RefuseWaiting(request_id, QueueFull("")))  # chosen before it was admitted, or ended
    out = run(engine)
    assert not any(chunk.error for name in out for chunk in out[name]), chunks
    engine.submit(fake_request("a3", [1], tenant_id="a", sampling=sampling))
    assert len(engine._waiting) == 1


def test_a_stream_that_has_begun_elsewhere_is_not_refused_for_those_waiting() -> None:
    engine, _ = make_engine(max_queued_requests=2)
    for name in ("new", "newer"):
        engine.submit(fake_request(name, [1]))
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    begun = [line.token_id for line in fake_tokens(fake_request("moved", [2], sampling=sampling), None)][:2]
    moved = [fake_request(f"moved {i}", [2], sampling=sampling, resume_token_ids=begun) for i in range(3)]
    for request in moved:
        engine.submit(request)
    with pytest.raises(QueueFull, match="max_queued_requests is 2, which is reached; 2 are in use"):
        engine.submit(fake_request("one more", [1]))
    engine.submit(fake_request("other", [1], tenant_id="none waits"))
    out = run(engine)
    assert [name for name, chunks in out.items() if chunks[-1].error] == ["newer"], "the streams go on"
    for request in moved:
        assert_as_alone((request, None), out[request.request_id])


def test_kv_memory_limits_a_request() -> None:
    engine, _ = make_engine(num_kv_blocks=4)
    sampling = SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True)
    request = fake_request("fits exactly", list(range(20)), sampling=sampling)
    engine.submit(request)
    assert_as_alone((request, None), run(engine)["fits exactly"])
    with pytest.raises(ContextOverflow, match=r"together 34.*holds 32.*num_kv_blocks"):
        engine.submit(fake_request("too long", list(range(21)), sampling=sampling))


@pytest.mark.parametrize(("policy", "stays"), [("lru", False), ("lfu", True), ("cost", True)])
def test_the_configured_policy_decides_who_leaves_the_rows(policy: str, stays: bool) -> None:
    engine = Engine(
        FakeBackend(BackendLimits(64, 8, 16, 8, 8)),
        EngineConfig.model_validate({"lora_eviction_policy": policy, "max_num_seqs": 1}),
    )
    popular, *others = (fake_adapter(name, 8) for name in ("popular", "a", "b"))
    for number, adapter in enumerate([popular] * 5 + others):
        engine.submit(fake_request(f"r{number}", [9, 1], adapter), adapter)
        run(engine)
    residents = {resident.digest for resident in engine.stats().residents}
    assert (popular.card.digest in residents) == stays
    assert others[1].card.digest in residents


def test_extras_are_bounded_and_released_with_their_adapter() -> None:
    backend = FakeBackend(BackendLimits(64, 8, 256, 8, 8, extra_weights_bytes=100))
    engine = Engine(backend, EngineConfig(max_num_seqs=2))

    def with_extras(name: str, extra_bytes: int) -> LoraAdapter:
        adapter = fake_adapter(name, 8)
        return replace(adapter, card=replace(adapter.card, extra_bytes=extra_bytes))

    too_large = with_extras("whole head", 101)
    with pytest.raises(AdapterTooLarge, match=r"101 bytes.*at most 100; raise engine.extra_weights_bytes"):
        engine.submit(fake_request("r", [1], too_large), too_large)
    adapters = [with_extras(f"a{i}", 60) for i in range(3)]
    submitted = [(fake_request(f"r{i}", [9, 1 + i], adapters[i % 3]), adapters[i % 3]) for i in range(9)]
    for request, adapter in submitted:
        engine.submit(request, adapter)
    chunks = run(engine)
    for request, adapter in submitted:
        assert_as_alone((request, adapter), chunks[request.request_id])
    # Two of them never fit together: each write but the first follows the release of what was there.
    assert len(backend.releases) == len(backend.writes) - 1 >= 2
    (left,) = engine.stats().residents
    dropped = engine.unload_adapter(left.digest)
    run(engine)
    assert dropped.result() == 8
    assert len(backend.releases) == len(backend.writes)


def test_a_step_leaves_out_whose_adapter_is_still_being_written_unless_there_is_nobody_else() -> None:
    engine, backend = make_engine()
    adapter = fake_adapter("slow", 8)
    base = (fake_request("base", range(9), sampling=SamplingParams(temperature=0.0, max_tokens=6)), None)
    adapted = (
        fake_request("adapted", range(9), adapter, sampling=SamplingParams(temperature=0.0, max_tokens=6)),
        adapter,
    )
    backend.unready = set(range(1, 8))
    out: dict[str, list[TokenChunk]] = {}
    engine.submit(*base)
    engine.submit(*adapted)
    for _ in range(3):
        collect(out, engine.step())
        engine.check()
    assert list(out) == ["base"]
    assert len(tokens_of(out["base"])) == 3
    backend.unready = set()
    collect(out, engine.step())
    assert list(out) == ["base", "adapted"]
    backend.unready = set(range(1, 8))  # from here on a step with no other sequence waits
    for chunks in run(engine).items():
        out.setdefault(chunks[0], []).extend(chunks[1])
    for submitted in (base, adapted):
        assert_as_alone(submitted, out[submitted[0].request_id])
