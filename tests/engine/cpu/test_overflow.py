"""An adapter whose values are too large for float32 ends its own requests; no other tokens change."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.config import CpuConfig, EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.cpu.outputs import one_row, sample
from app.engine.engine import Engine
from app.engine.errors import AdapterOverflow
from app.engine.models.linear_modules import DENSE_TARGETS
from app.engine.request import GenerateRequest, SamplingParams, TokenChunk
from app.kernels.machine.thread_team import ThreadTeam
from tests.engine.adapters.random_adapters import random_adapter
from tests.engine.batch_invariance import dense_spec, grid_tensors


def test_an_adapter_that_overflows_ends_its_own_requests() -> None:
    spec = dense_spec()
    # Few blocks and no shared prefixes: what the adapter left in its blocks is written over by those that follow.
    config = EngineConfig(cpu=CpuConfig(num_threads=1), num_kv_blocks=6, lora_pool_rows=64, enable_prefix_caching=False)
    engine = Engine(CpuBackend(spec, grid_tensors(spec, 1), config), config)
    good, large = random_adapter(spec, 8, DENSE_TARGETS, 3), random_adapter(spec, 8, DENSE_TARGETS, 3, size=1e12)
    adapters = {"base": None, "good": good, "greedy": large, "drawn": large}

    def submit(name: str, adapter: LoraAdapter | None) -> None:
        sampling = SamplingParams(max_tokens=6, temperature=0.8 * (name != "greedy"), num_logprobs=2, ignore_eos=True)
        ref = None if adapter is None else AdapterRef(name, adapter.card.digest, "t")
        engine.submit(GenerateRequest(name, "t", (5, 6, 7), sampling, ref), adapter)

    def run(*names: str) -> dict[str, list[TokenChunk]]:
        for name in names:
            submit(name, adapters[name])
        found: dict[str, list[TokenChunk]] = {name: [] for name in names}
        while engine.has_work:
            for chunk in engine.step():
                found[chunk.request_id].append(chunk)
            engine.check()
        return found

    alone = run("base") | run("good")
    together = run(*adapters)
    for name in ("greedy", "drawn"):
        (chunk,) = together[name]
        assert isinstance(chunk.error, AdapterOverflow)
        assert f"'{name}' is not a finite number after 3 tokens" in str(chunk.error)
    for found in (together, run("base", "good")):
        for name, chunks in alone.items():
            assert [(c.token_ids, c.logprobs) for c in found[name]] == [(c.token_ids, c.logprobs) for c in chunks]


@pytest.mark.parametrize("target", [-1, 4, 7], ids=["drawn", "a token of the prompt", "the one that overflowed"])
@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_a_row_with_a_logit_that_is_not_finite_is_named(lost: float, target: int) -> None:
    """Whichever token's log-probability is asked for: the row has none."""
    logits = np.linspace(-1, 1, 20, dtype=np.float32)[None].copy()
    sampling = replace(one_row(), targets=np.array([target], np.int32), num_logprobs=np.full(1, -1, np.int32))
    with closing(ThreadTeam(1)) as team:
        assert sample(logits.copy(), sampling, team).overflowed == ()
        logits[0, 7] = lost
        assert sample(logits, sampling, team).overflowed == (0,)
