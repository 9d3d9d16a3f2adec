"""Make a new engine do everything once before it is called ready.

In: an engine that nobody uses yet. Out: the same engine, with its kernels compiled (the first start on a
machine takes most of a minute for that; later ones find them cached) and its memory touched. Afterwards
its books are as they were: nothing cached, and nothing resident but the hot set, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.deployments.steering import rows_of
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.lora import TARGETS, LoraAdapter, LoraKey, LoraPair
from app.engine.engine import Engine
from app.engine.errors import EngineFailure
from app.engine.models.spec import ModelSpec
from app.engine.request import GenerateRequest, SamplingParams

#: Enough prompt tokens for a prefill that is no decode, and enough answers to decode several at a time.
NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS, NUM_REQUESTS = 24, 4, 4


def warm_up(engine: Engine, spec: ModelSpec, *, adapters: bool) -> None:
    """Run base and (if there are rank rows) adapter requests. Raises EngineFailure if that does not work."""
    adapter = _null_adapter(spec) if adapters else None
    if spec.max_positions < NUM_PROMPT_TOKENS + NUM_ANSWER_TOKENS:
        return
    requests = []
    for index in range(NUM_REQUESTS):
        uses_adapter = adapter is not None and index % 2 == 1
        sampling = SamplingParams(
            max_tokens=NUM_ANSWER_TOKENS,
            temperature=float(index // 2),
            top_k=5,
            repetition_penalty=1.1,
            num_logprobs=1,
            ignore_eos=True,
        )
        request = GenerateRequest(
            f"warm-up-{index}",
            tuple((index + position) % spec.vocab_size for position in range(NUM_PROMPT_TOKENS)),
            sampling,
            AdapterRef("warm-up", adapter.card.digest) if adapter is not None and uses_adapter else None,
            cache_salt=b"warm-up",
        )
        requests.append((request, adapter if uses_adapter else None))
    _run(engine, requests)
    if adapter is not None:
        engine.drop_adapter(adapter.card.digest)
        engine.step()


def hottest_that_fit(max_ranks: Sequence[int], num_rank_rows: int) -> int:
    """How many of the hottest adapters (their ranks, the hottest first) have rows at the same time."""
    num_rows = 0
    for count, max_rank in enumerate(max_ranks):
        num_rows += rows_of(max_rank)
        if num_rows > num_rank_rows:
            return count
    return len(max_ranks)


def warm_adapters(engine: Engine, adapters: Sequence[LoraAdapter]) -> None:
    """Make adapters resident, the hottest first in `adapters` and last to be evicted. Raises EngineFailure."""
    for adapter in reversed(adapters):
        request = GenerateRequest(
            f"warm-up-{adapter.card.digest}",
            (0,),
            SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            AdapterRef("warm-up", adapter.card.digest),
            cache_salt=b"warm-up",
        )
        _run(engine, [(request, adapter)])


def _run(engine: Engine, requests: Sequence[tuple[GenerateRequest, LoraAdapter | None]]) -> None:
    for request, adapter in requests:
        engine.submit(request, adapter)
    num_open = len(requests)
    while num_open:
        for chunk in engine.step():
            if chunk.finish_reason == "error":
                raise chunk.error or EngineFailure("the engine failed while warming up")
            num_open -= chunk.finish_reason is not None


def _null_adapter(spec: ModelSpec) -> LoraAdapter:
    """An adapter of rank 1 on every module that changes nothing."""
    weights = {}
    for layer in range(len(spec.layers)):
        for target in TARGETS:
            d_in, d_out = spec.target_shape(layer, target)
            weights[LoraKey(layer, target)] = LoraPair(
                np.zeros((1, d_in), np.float32), np.zeros((1, d_out), np.float32)
            )
    size = sum(pair.a.nbytes + pair.b.nbytes for pair in weights.values())
    card = AdapterCard("warm-up", spec.digest, 1, tuple(sorted(TARGETS)), "float32", size)
    return LoraAdapter(card, weights)
