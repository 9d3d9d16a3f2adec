"""Rows are written as planned; an adapter that cannot be written ends its own requests only; none waits for ever."""

from __future__ import annotations

from app.engine.adapters.card import AdapterRef
from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.errors import AdapterWriteFailed
from app.engine.request import SamplingParams
from tests.engine.driving import ADAPTERS, assert_as_alone, assert_empty, make_engine, run
from tests.fakes import FakeBackend, fake_adapter, fake_request

LIMITS = BackendLimits(num_kv_blocks=64, block_size=8, lora_pool_rows=64, rank_alignment=8, max_loras=8)


class SlowLink(FakeBackend):
    """Writes go on behind the engine's back; those of `broken` slots fail, and a step that waits for one finds out."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.broken: set[int] = set()

    def is_ready(self, adapter_slot: int) -> bool:
        if adapter_slot in self.broken and adapter_slot not in self.unready:
            raise AdapterWriteFailed(f"slot {adapter_slot}: the link is down")
        return super().is_ready(adapter_slot)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        waited_for = set(batch.run_adapter_slots.tolist()) & self.unready
        self.unready -= waited_for
        if waited_for & self.broken:
            raise AdapterWriteFailed("the link is down")
        return super().forward(batch)


def test_a_write_that_fails_while_the_step_waits_for_it_ends_its_own_requests_only() -> None:
    backend = SlowLink()
    engine = Engine(backend, EngineConfig())
    bad, good = fake_adapter("bad", 8), fake_adapter("good", 8)
    requests = {"bad": (fake_request("bad", [1], bad), bad), "good": (fake_request("good", [2], good), good)}
    for submitted in requests.values():
        engine.submit(*submitted)
    backend.unready, backend.broken = {1, 2}, {1}  # slots are given out from 1 on
    assert engine.step() == [], "nothing is computed in a step whose wait was in vain"
    assert engine.failure is None
    out = run(engine)
    (chunk,) = out["bad"]
    assert isinstance(chunk.error, AdapterWriteFailed)
    assert_as_alone(requests["good"], out["good"])
    assert [item.digest for item in engine.stats().residents] == [good.card.digest]
    assert_empty(engine)


def test_a_write_that_is_known_to_have_failed_is_not_computed_with() -> None:
    backend = SlowLink()
    engine = Engine(backend, EngineConfig())
    bad = fake_adapter("bad", 8)
    backend.broken = {1}
    submitted = fake_request("base", [1], sampling=SamplingParams(max_tokens=4, ignore_eos=True)), None
    engine.submit(*submitted)
    engine.submit(fake_request("bad", [1], bad), bad)
    out = run(engine)
    assert isinstance(out["bad"][-1].error, AdapterWriteFailed)
    assert_as_alone(submitted, out["base"])
    assert engine.stats().residents == ()


def test_a_request_that_needs_all_rows_starts_after_the_adapter_that_is_being_loaded() -> None:
    """In the step that loads one, nothing else runs and nothing else has room."""
    engine, backend = make_engine(rows=32, max_loras=8)
    small, large = ADAPTERS[1], ADAPTERS[4]
    assert large.card.max_rank > 16
    loaded = engine.load_adapter(small, AdapterRef("small", small.card.digest, "t"))
    submitted = fake_request("large", [1, 2], large), large
    engine.submit(*submitted)
    engine.step()
    assert loaded.result(timeout=0) == small.card.size_bytes
    assert backend.num_forwards == 0
    assert_as_alone(submitted, run(engine)["large"])


def test_a_granted_adapter_that_cannot_be_written_ends_the_requests_that_came_with_it() -> None:
    engine, backend = make_engine()
    adapter = ADAPTERS[1]
    backend.write_error = AdapterWriteFailed("the link is down")
    loaded = engine.load_adapter(adapter, AdapterRef("it", adapter.card.digest, "t"))
    engine.submit(fake_request("r", [1], adapter), adapter)
    (chunk,) = run(engine)["r"]
    assert chunk.error is backend.write_error
    assert loaded.exception(timeout=0) is backend.write_error
    assert engine.stats().residents == ()
    assert not engine.has_work
