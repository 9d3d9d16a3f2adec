"""Warm-up: run requests through a new engine before it is called ready.

It compiles the kernels (most of a minute at the first start on a machine; later starts find them cached) and touches
the memory. Afterwards the engine's pools are empty again: nothing cached, nothing resident.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.engine import Engine
from app.engine.errors import EngineFailure, QueueFull
from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import ModelSpec
from app.engine.request import GenerateRequest, PoolingParams, SamplingParams

#: The tenant of the warm-up requests, and the name of their adapter.
WARM_UP = "warm-up"

#: Enough prompt tokens for a prefill, and enough answer tokens and requests to decode several at a time.
NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS, NUM_REQUESTS = 24, 4, 4


def warm_up(engine: Engine) -> None:
    """Run base and (if there are rank rows) adapter requests. Raises EngineFailure if one fails."""
    num_prompt_tokens = min(NUM_PROMPT_TOKENS, engine.max_model_len - NUM_ANSWER_TOKENS)
    if num_prompt_tokens < 1:
        return
    adapter = _null_adapter(engine.spec) if engine.max_rank else None
    card = adapter.card if adapter is not None else engine.merged
    ref = AdapterRef(WARM_UP, card.digest, WARM_UP) if card is not None else None
    pooling = PoolingParams(engine.spec.pooling if engine.only_embeds else "mean")
    requests = []
    for index in range(NUM_REQUESTS + engine.can_embed):
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
            WARM_UP,
            tuple((index + position) % engine.spec.vocab_size for position in range(num_prompt_tokens)),
            sampling,
            ref if uses_adapter or engine.merged is not None else None,
            cache_salt=WARM_UP.encode(),
            pooling=pooling if engine.only_embeds or index == NUM_REQUESTS else None,
        )
        requests.append((request, adapter if uses_adapter else None))
    _run(engine, requests)
    if adapter is not None:
        engine.unload_adapter(adapter.card.digest)
        engine.step()


def _run(engine: Engine, requests: Sequence[tuple[GenerateRequest, LoraAdapter | None]]) -> None:
    """Run all to their ends, as many at a time as the engine queues. Raises the error that a request ends with."""
    unsubmitted = list(reversed(requests))
    num_open = len(requests)
    while num_open:
        with contextlib.suppress(QueueFull):
            while unsubmitted:
                engine.submit(*unsubmitted[-1])
                unsubmitted.pop()
        for chunk in engine.step():
            if chunk.finish_reason == "error":
                raise chunk.error or EngineFailure("the engine failed while warming up")
            num_open -= chunk.finish_reason is not None


def _null_adapter(spec: ModelSpec) -> LoraAdapter:
    """An adapter of rank 1 on every module that all tokens use; it changes nothing.

    Of a model with `LayerSpec.stored` modules it has the first of each layer: others may have no LoRA.
    """
    weights = {}
    for layer in range(len(spec.layers)):
        modules = layer_linear_modules(spec, layer)
        for module in modules[:1] if spec.layers[layer].stored else modules:
            if not module.has_rank_rows:
                continue
            for target, d_out in zip(module.targets, module.widths, strict=True):
                a, b = np.zeros((1, module.d_in), np.float32), np.zeros((1, d_out), np.float32)
                weights[LoraKey(layer, target)] = LoraPair(a, b)
    size = sum(pair.a.nbytes + pair.b.nbytes for pair in weights.values())
    targets = tuple(sorted({key.target for key in weights}))
    card = AdapterCard(WARM_UP, spec.digest, 1, targets, "float32", size)
    return LoraAdapter(card, weights)
