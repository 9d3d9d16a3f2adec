"""One round of the fuzz for bit identity: requests alone, and the same requests in batches.

Requests of all kinds are first run alone: one at a time, in an engine with room for everything and one thread. Then
they run together in engines of random shape: blocks, chunks and batches of random sizes, one or two threads, draft
tokens verified or not, of right and wrong predictions, memory tight enough for preemption and for adapters (in float32
and in bfloat16, plain, and with whole matrices, norms, scales, biases or token rows of their own) to evict each other,
prefix caches that hit, aborts and unloads in between, and streams that resume in the middle. Zero differing bits are
allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.backend import Backend
from app.engine.config import CpuConfig, DeviceConfig, EngineConfig, Speculation
from app.engine.engine import Engine
from app.engine.models.hf.config import spec_from_config
from app.engine.models.linear_modules import DENSE_TARGETS
from app.engine.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    SharedExpertSpec,
)
from app.engine.models.weight_names import expected_tensors
from app.engine.request import GenerateRequest, SamplingParams, TokenLogprobs
from app.engine.structured_output.grammar_builder import json_grammar
from tests.engine.adapters.random_adapters import random_adapter, random_mixture_adapter, with_random_extras
from tests.engine.cuda.grids import on_grids
from tests.engine.structured_output.schemas import follows, random_schema
from tests.engine.structured_output.tokens import text_of, tiny_vocabulary
from tests.seeds import any_seed

RANKS = (1, 3, 8, 16, 24, 40)


class Case(NamedTuple):
    request: GenerateRequest
    adapter: LoraAdapter | None


class Result(NamedTuple):
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None


def dense_spec() -> ModelSpec:
    """Biases, and a window in every other layer."""
    rope = RopeSpec(tuple((10000.0 ** -(np.arange(0, 24, 2) / 24)).tolist()))
    whole = AttentionSpec(6, 2, 24, 24**-0.5, rope, qkv_bias=True)
    windowed = dataclasses.replace(whole, window=21)
    mlp = MlpSpec(72)
    return ModelSpec(
        "fuzz", "llama", "base", 120, 40, 256, 1e-5, True, (LayerSpec(whole, mlp), LayerSpec(windowed, mlp)), 1, (2,)
    )


def gemma_spec(model_type: str) -> ModelSpec:
    """What a small configuration of Gemma 2 or 3 says: soft caps in one; norms of heads and two ropes in the other."""
    sizes = {"vocab_size": 120, "hidden_size": 40, "intermediate_size": 72, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "query_pre_attn_scalar": 24}
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0} if model_type == "gemma2" else {}
    layers = {"num_hidden_layers": 2, "sliding_window": 21, "sliding_window_pattern": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    config = {"model_type": model_type} | sizes | heads | caps | layers | ids
    return spec_from_config(config, "fuzz", "base")


def mixture_spec() -> ModelSpec:
    """A dense layer, then experts beside a shared one, then experts alone; norms over all heads together."""
    dense = dense_spec()
    whole = dataclasses.replace(dense.layers[0].attention, qkv_bias=False, qk_norm=True, whole_qk_norm=True)
    router = RouterSpec(6, 2, normalised=True)
    shared = SharedExpertSpec("shared_expert", MlpSpec(24), is_gated=True)
    mixed = LayerSpec(whole, MlpSpec(40), ExpertsSpec(router, shared))
    layers = (LayerSpec(whole, MlpSpec(72)), mixed, mixed)
    return dataclasses.replace(dense, family="qwen2_moe", layers=layers)


def latent_spec() -> ModelSpec:
    """Latent attention with latents of queries, a dense layer, then experts in groups beside a shared one."""
    dense = dense_spec()
    rope = RopeSpec((1.0, 0.1, 0.01), attention_factor=0.9)
    latent = LatentSpec(kv_rank=32, key_size=16, rope_size=6, value_size=32, query_rank=20, norm_eps=1e-6)
    attention = AttentionSpec(3, 3, 22, 22**-0.5, rope, latent=latent)
    router = RouterSpec(6, 2, normalised=False, scale=1.5, num_groups=3, top_groups=2)
    shared = SharedExpertSpec("shared_experts", MlpSpec(24), is_gated=False)
    mixed = LayerSpec(attention, MlpSpec(40), ExpertsSpec(router, shared))
    return dataclasses.replace(dense, family="deepseek_v2", layers=(LayerSpec(attention, MlpSpec(72)), mixed, mixed))


def sinks_spec() -> ModelSpec:
    """Sinks, windows in every other layer, and clamped experts with biases."""
    dense = dense_spec()
    whole, windowed = (dataclasses.replace(layer.attention, o_bias=True, sinks=True) for layer in dense.layers)
    experts = ExpertsSpec(RouterSpec(6, 2, normalised=True, name="router", has_bias=True), alternates=True)
    mlp = MlpSpec(40, bias=True, limit=2.0, alpha=1.702)
    layers = (LayerSpec(windowed, mlp, experts), LayerSpec(whole, mlp, experts))
    return dataclasses.replace(dense, family="gpt_oss", layers=layers)


def grid_tensors(spec: ModelSpec, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    generator = np.random.default_rng(seed)

    def weight(*shape: int, centre: float = 0.0) -> np.ndarray:
        """Matrices lie on grids, as quantised checkpoints' do: the CPU engine may store them in 8 bits."""
        values = (centre + generator.standard_normal(shape) * 0.3).astype(np.float32)
        return on_grids(values, 4) if values.ndim == 2 else values

    for name, shape in expected_tensors(spec).items():
        yield name, weight(*shape, centre=float(name.endswith("norm.weight")))


def _sampling(generator: np.random.Generator) -> SamplingParams:
    settings = SamplingParams(
        max_tokens=int(generator.integers(1, 24)),
        temperature=0.0,
        seed=int(generator.integers(2**63)),
        num_logprobs=[None, 0, 3][int(generator.integers(3))],
        ignore_eos=bool(generator.integers(2)),
    )
    kind = generator.integers(4)
    if kind == 1:
        settings = dataclasses.replace(settings, temperature=0.9, top_p=0.9)
    elif kind == 2:
        settings = dataclasses.replace(settings, temperature=1.3, top_k=20, min_p=0.02)
    elif kind == 3:
        settings = dataclasses.replace(
            settings, temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
        )
    return settings


def _structured(generator: np.random.Generator, settings: SamplingParams) -> SamplingParams:
    """The same with biases, an early end forbidden, or a grammar."""
    kind = generator.integers(3)
    if kind == 0:
        ids = generator.choice(120, 10, replace=False).tolist()
        return dataclasses.replace(settings, logit_bias=tuple((i, float(generator.uniform(-9, 9))) for i in ids))
    if kind == 1:
        return dataclasses.replace(settings, min_tokens=int(generator.integers(1, settings.max_tokens + 1)))
    grammar = json_grammar(random_schema(generator), "schema")
    max_tokens = int(generator.integers(1, 47))  # with the longest prompt no more than the smallest memory
    return dataclasses.replace(settings, grammar=grammar, ignore_eos=False, max_tokens=max_tokens)


_DTYPES = ("F32", "BF16", "BF16", "F32", "BF16", "F32")


def _mixture_adapters(generator: np.random.Generator, spec: ModelSpec) -> list[LoraAdapter]:
    return [random_mixture_adapter(spec, rank, generator, dtype) for rank, dtype in zip(RANKS, _DTYPES, strict=True)]


def _dense_adapters(generator: np.random.Generator, spec: ModelSpec) -> list[LoraAdapter]:
    adapters = []
    for rank, dtype in zip(RANKS, _DTYPES, strict=True):
        targets = DENSE_TARGETS if rank % 3 else [t for t in DENSE_TARGETS if generator.integers(2)] or ["v_proj"]
        adapters.append(random_adapter(spec, rank, targets, int(generator.integers(2**31)), size=0.3, dtype=dtype))
    for rank, dtype in ((1, "BF16"), (8, "F32"), (16, "BF16"), (24, "F32")):
        targets = [t for t in DENSE_TARGETS if generator.integers(2)] or ["o_proj"]
        plain = random_adapter(spec, rank, targets, int(generator.integers(2**31)), size=0.3, dtype=dtype)
        adapters.append(with_random_extras(plain, spec, generator))
    return adapters


def _activated(adapter: LoraAdapter, generator: np.random.Generator) -> LoraAdapter:
    """The same, from an invocation of one to three tokens on."""
    invocation = tuple(generator.integers(3, 120, int(generator.integers(1, 4))).tolist())
    digest = f"{adapter.card.digest} from {invocation}"
    return dataclasses.replace(
        adapter, card=dataclasses.replace(adapter.card, digest=digest, invocation_tokens=invocation)
    )


def _adapters(generator: np.random.Generator, spec: ModelSpec) -> list[LoraAdapter]:
    has_experts = any(layer.experts for layer in spec.layers)
    return (_mixture_adapters if has_experts else _dense_adapters)(generator, spec)


def _cases(generator: np.random.Generator, plain: Sequence[LoraAdapter], count: int, structured: float) -> list[Case]:
    activated = [_activated(plain[int(generator.integers(len(plain)))], generator) for _ in range(4)]
    adapters = [None, None, *plain, *activated]
    prefixes = [tuple(generator.integers(3, 120, n).tolist()) for n in (0, 16, 40, 64)]
    cases = []
    for index in range(count):
        adapter = adapters[int(generator.integers(len(adapters)))]
        tail = tuple(generator.integers(3, 120, int(generator.integers(1, 50))).tolist())
        if adapter is not None and generator.integers(4):  # else what an activated one says of the base is tested
            place = int(generator.integers(len(tail)))
            tail = tail[:place] + adapter.card.invocation_tokens + tail[place:]
        sampling = _sampling(generator)
        request = GenerateRequest(
            request_id=f"r{index}",
            token_ids=prefixes[int(generator.integers(len(prefixes)))] + tail,
            sampling=_structured(generator, sampling) if generator.random() < structured else sampling,
            adapter=None if adapter is None else AdapterRef(f"a{adapter.card.max_rank}", adapter.card.digest, "t"),
            tenant_id=f"t{index % 3}",
            cache_salt=bytes([index % 2]),
        )
        cases.append(Case(request, adapter))
    return cases


def _run(
    engine: Engine, cases: list[Case], aborted: set[str], generator: np.random.Generator | None
) -> dict[str, Result]:
    """Step until everything has ended; with a generator, requests arrive over time and adapters are unloaded."""
    waiting, live = list(reversed(cases)), 0
    tokens: dict[str, list[int]] = {c.request.request_id: [] for c in cases}
    logprobs: dict[str, list[TokenLogprobs]] = {c.request.request_id: [] for c in cases}
    reasons: dict[str, str | None] = {}
    while waiting or live:
        for _ in range(len(waiting) if generator is None else min(len(waiting), int(generator.integers(0, 4)))):
            case = waiting.pop()
            engine.submit(case.request, case.adapter)
            live += 1
        if generator is not None and generator.integers(12) == 0:
            digests = [c.adapter.card.digest for c in cases if c.adapter is not None]
            if digests:
                engine.unload_adapter(digests[int(generator.integers(len(digests)))])
        if generator is not None and aborted and generator.integers(3) == 0:
            engine.abort(sorted(aborted)[int(generator.integers(len(aborted)))])
        for chunk in engine.step():
            tokens[chunk.request_id] += chunk.token_ids
            logprobs[chunk.request_id] += chunk.logprobs
            if chunk.finish_reason is not None:
                assert chunk.error is None, chunk.error
                reasons[chunk.request_id] = chunk.finish_reason
                live -= 1
    engine.check()
    return {key: Result(tuple(tokens[key]), tuple(logprobs[key]), reasons[key]) for key in tokens}


def _random_config(
    generator: np.random.Generator, device: DeviceConfig, kv_tokens: Sequence[int], largest_extras: int
) -> EngineConfig:
    def pick(*values: int) -> int:
        return values[int(generator.integers(len(values)))]

    block_size = pick(16, 32, 48)
    num_threads = pick(1, 2)
    if isinstance(device, CpuConfig):
        device = device.model_copy(update={"num_threads": num_threads})
    config = EngineConfig(
        block_size=block_size,
        num_kv_blocks=pick(*kv_tokens) // block_size + 1,
        lora_pool_rows=pick(64, 96, 256),
        max_loras=pick(2, 3, 8),
        extra_weights_bytes=pick(largest_extras, largest_extras * 3 // 2, 1 << 24),  # one adapter's always fit
        max_num_batched_tokens=pick(8, 13, 32, 100, 256),
        target_step_ms=pick(0, 1, 5, 100),
        max_tenant_slowdown=float(generator.choice([0.0, 1.0, 1.5])),
        max_num_seqs=pick(1, 3, 8, 32),
        lora_load_bytes_per_step=pick(1, 100_000, 1 << 24),
        enable_prefix_caching=bool(generator.integers(4)),
        speculative_decoding=_speculation(generator) if isinstance(device, CpuConfig) else "auto",
    )
    return config.on(device)


def _speculation(generator: np.random.Generator) -> Speculation:
    settings: tuple[Speculation, ...] = ("off", "auto", "auto", 1, 4, 16)
    return settings[int(generator.integers(len(settings)))]


def _predicted(case: Case, result: Result, generator: np.random.Generator) -> Case:
    """The same request with its answer foretold, some of it wrongly."""
    foretold = np.array(result.token_ids, np.int32)
    is_wrong = generator.random(len(foretold)) < generator.choice([0.0, 0.1, 0.5])
    foretold[is_wrong] = generator.integers(3, 120, int(is_wrong.sum()))
    return Case(dataclasses.replace(case.request, prediction_ids=tuple(foretold.tolist())), case.adapter)


def disturbed(
    make_backend: Callable[[ModelSpec, Iterator[tuple[str, np.ndarray]], EngineConfig], Backend],
    device: DeviceConfig,
    *,
    spec: ModelSpec | None = None,
    tensors: Callable[[], Iterator[tuple[str, np.ndarray]]] | None = None,
    adapters: Sequence[LoraAdapter] | None = None,
    num_engines: int = 8,
    kv_tokens: Sequence[int] = (160, 192, 240, 1600),
    structured: float = 0.25,
) -> np.ndarray:
    """One random set of requests, alone and in several engines.

    Returns [batches, preemptions, evictions, cached tokens, accepted draft tokens, rejected ones].

    `device` is the same everywhere but for its threads, the other settings are drawn; KV memory for one of `kv_tokens`.
    The model is a dense one if no `spec` is given, its weights and the `adapters` are random if these are not;
    `structured` is the share of requests with grammars and biases.
    """
    seed = any_seed()
    generator = np.random.default_rng(seed)
    spec = spec or dense_spec()
    weights = tensors or (lambda: grid_tensors(spec, seed))
    cases = _cases(generator, adapters or _adapters(generator, spec), 40, structured)
    one_thread = device.model_copy(update={"num_threads": 1}) if isinstance(device, CpuConfig) else device
    roomy = EngineConfig(
        num_kv_blocks=64, lora_pool_rows=256, enable_prefix_caching=False, speculative_decoding="off"
    ).on(one_thread)
    alone: dict[str, Result] = {}
    backend = make_backend(spec, weights(), roomy)
    engine = Engine(backend, roomy, grammars=tiny_vocabulary)
    for case in cases:
        alone |= _run(engine, [case], set(), None)
    engine.close()
    for case in cases:
        check_follows(case.request.sampling.grammar, alone[case.request.request_id])

    seen = np.zeros(6, np.int64)
    for _ in range(num_engines):
        largest_extras = max((case.adapter.card.extra_bytes for case in cases if case.adapter is not None), default=0)
        config = _random_config(generator, device, kv_tokens, largest_extras)
        backend = make_backend(spec, weights(), config)
        engine = Engine(backend, config, grammars=tiny_vocabulary)
        chosen = [cases[i] for i in generator.permutation(len(cases))[: int(generator.integers(5, 41))]]
        aborted = {c.request.request_id for c in chosen if generator.integers(10) == 0}
        expected = {c.request.request_id: alone[c.request.request_id] for c in chosen}
        chosen = [
            _predicted(case, alone[case.request.request_id], generator) if generator.integers(2) else case
            for case in chosen
        ]
        for i, case in enumerate(chosen):
            if generator.integers(5) == 0:
                chosen[i], expected[case.request.request_id] = _resumed(case, alone, generator)
        results = _run(engine, chosen, aborted, generator)
        for key, result in results.items():
            if result.finish_reason == "abort":
                count = len(result.token_ids)
                assert key in aborted
                assert result.token_ids == expected[key].token_ids[:count], (seed, config)
                assert result.logprobs == expected[key].logprobs[: len(result.logprobs)], (seed, config)
            else:
                assert result == expected[key], (seed, config, key)
        stats = engine.stats()
        seen += [
            stats.num_steps,
            stats.num_preemptions,
            stats.num_adapter_evictions,
            stats.num_cached_tokens,
            stats.num_accepted_tokens,
            stats.num_draft_tokens - stats.num_accepted_tokens,
        ]
        engine.close()
    return seen


def check_follows(grammar: str, result: Result) -> None:
    """An answer that has ended is valid by its schema."""
    if grammar and result.finish_reason == "stop":
        assert follows(text_of(list(result.token_ids)), grammar), (grammar, text_of(list(result.token_ids)))


def _resumed(case: Case, alone: dict[str, Result], generator: np.random.Generator) -> tuple[Case, Result]:
    """The same request after a crash: some tokens were sent already, the rest must follow."""
    result = alone[case.request.request_id]
    if len(result.token_ids) < 2:
        return case, result
    count = int(generator.integers(1, len(result.token_ids)))
    request = dataclasses.replace(case.request, resume_token_ids=result.token_ids[:count])
    return Case(request, case.adapter), Result(
        result.token_ids[count:], result.logprobs[count:] if result.logprobs else (), result.finish_reason
    )
