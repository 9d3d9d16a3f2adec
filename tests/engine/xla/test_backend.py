"""The JAX backend through the engine: no compilation by adapters, bits independent of company, donated memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.engine.adapters.extras import extra_bytes
from app.engine.adapters.lora import TARGETS, LoraAdapter
from app.engine.config import EngineConfig, XlaConfig
from app.engine.engine import Engine
from app.engine.errors import AdapterMismatch
from app.engine.request import GenerateRequest, SamplingParams, TokenLogprobs
from app.engine.xla.backend import JaxBackend
from app.engine.xla.tables import XlaAdapters
from app.kernels.matmul.quantised import Quantised
from tests.engine.adapters.making import random_adapter, tiny_spec, with_random_extras
from tests.engine.xla.making import counting_compilations, tiny_backend
from tests.fakes import fake_request

SPEC = tiny_spec()
CONFIG = EngineConfig(
    num_kv_blocks=48, adapter_rank_rows=128, max_adapter_slots=8, max_batch_tokens=64, max_batch_sequences=8,
    adapter_extra_bytes=200_000,
)  # fmt: skip


@pytest.fixture(scope="module", params=[("cpu", "float32"), ("cpu", "int8"), ("xla", "float32")], ids="-".join)
def backend(request: pytest.FixtureRequest) -> Iterator[JaxBackend]:
    """One backend per form and weight storage for the module: compiling it is the expensive part."""
    form, storage = request.param
    made = tiny_backend(CONFIG.on(XlaConfig(form=form, weight_storage=storage)), SPEC)
    assert isinstance(made._weights.layers.qkv, Quantised) == (storage == "int8")
    made.programs.wait()
    yield made
    made.close()


def run(
    backend: JaxBackend, requests: list[tuple[GenerateRequest, LoraAdapter | None]], stagger: np.random.Generator | None
) -> dict[str, list[TokenLogprobs]]:
    """Every request's tokens with their log-probabilities, submitted together or at random steps."""
    for adapter_slot in range(1, CONFIG.max_adapter_slots):
        backend.release_adapter(adapter_slot)  # as the engine before left them
    engine = Engine(backend, CONFIG)
    waiting, out = list(requests), {request.request_id: [] for request, _ in requests}
    while waiting or engine.has_work:
        while waiting and (stagger is None or stagger.random() < 0.4 or not engine.has_work):
            engine.submit(*waiting.pop())
        for chunk in engine.step():
            assert chunk.error is None, chunk.error
            out[chunk.request_id] += chunk.logprobs
    return out


def scaled_and_shifted(adapter: LoraAdapter) -> LoraAdapter:
    """With DoRA and lora_bias on every module."""
    generator = np.random.default_rng()
    sizes = {key: pair.b.shape[1] for key, pair in adapter.weights.items()}
    vectors = [
        {key: generator.normal(1, 0.3, size).astype(np.float32) for key, size in sizes.items()} for _ in range(2)
    ]
    changed = dataclasses.replace(adapter, magnitudes=vectors[0], delta_biases=vectors[1])
    card = dataclasses.replace(
        adapter.card, digest=f"{adapter.card.digest} scaled", extra_bytes=extra_bytes(changed, SPEC)
    )
    return dataclasses.replace(changed, card=card)


def test_a_hundred_adapters_of_any_rank_compile_nothing(backend: JaxBackend) -> None:
    generator = np.random.default_rng()
    assert backend.programs.num_compiled == len(backend.programs.buckets)
    ranks = [1, 64, *generator.integers(1, 65, 98).tolist()]
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, num_logprobs=0)
    requests = []
    for number, rank in enumerate(ranks):
        targets = generator.choice(TARGETS, int(generator.integers(1, 8)), replace=False).tolist()
        prompt = generator.integers(0, 64, int(generator.integers(1, 30))).tolist()
        adapter = random_adapter(SPEC, rank, targets, dtype=["F32", "BF16"][number % 2])
        if number % 3 == 0:
            adapter = with_random_extras(adapter, SPEC, generator)
        requests.append((fake_request(f"r{number}", prompt, adapter, sampling=sampling), adapter))
    requests += [(fake_request(f"base{n}", [n + 3], sampling=sampling), None) for n in range(5)]
    with counting_compilations() as count:
        # The counter itself must count: a new shape compiles.
        jax.jit(lambda x: x + 1).lower(jnp.zeros(int(generator.integers(1000, 2000)))).compile()
        seen = count.num_compiled
        assert seen > 0
        out = run(backend, requests, generator)
        assert count.num_compiled == seen
    assert all(len(lines) == 3 for lines in out.values())
    assert backend.programs.num_compiled == len(backend.programs.buckets)


def test_a_request_has_the_same_bits_alone_and_in_any_company(backend: JaxBackend) -> None:
    generator = np.random.default_rng()
    kinds = [(1, "BF16"), (8, "F32"), (21, "BF16"), (64, "F32")]
    adapters = [None, *(random_adapter(SPEC, rank, dtype=dtype) for rank, dtype in kinds)]
    for rank, dtype in ((3, "F32"), (16, "BF16"), (24, "F32")):
        adapters.append(with_random_extras(random_adapter(SPEC, rank, ["v_proj"], dtype=dtype), SPEC, generator))
    adapters.append(scaled_and_shifted(random_adapter(SPEC, 5)))
    for attempt in range(3):
        requests = []
        for number in range(14):
            adapter = adapters[int(generator.integers(len(adapters)))]
            # Prompts of few tokens share prefixes; 60 tokens span several chunks of the step.
            length = int(generator.choice([1, 5, 17, 40, 60]))
            prompt = np.concatenate([np.full(length // 2, 5), generator.integers(3, 64, length - length // 2)])
            sampling = SamplingParams(
                max_tokens=int(generator.integers(1, 25)),
                temperature=float(generator.choice([0.0, 0.9])),
                top_p=float(generator.choice([1.0, 0.9])),
                frequency_penalty=float(generator.choice([0.0, 0.5])),
                seed=number,
                ignore_eos=True,
                num_logprobs=3,
            )
            requests.append(
                (fake_request(f"r{attempt}-{number}", prompt.tolist(), adapter, sampling=sampling), adapter)
            )
        together = run(backend, requests, generator)
        for request, adapter in requests[:7]:
            alone = run(backend, [(request, adapter)], None)
            assert alone[request.request_id] == together[request.request_id]


def test_writing_and_serving_reuse_the_same_memory(backend: JaxBackend) -> None:
    def places() -> list[int]:
        held = [backend._rows, backend._kv]
        if isinstance(backend._adapters, XlaAdapters):
            held.append(backend._adapters.tables(backend._rows).own.memory)
        return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(held)]

    before = places()
    adapter = with_random_extras(random_adapter(SPEC, 5), SPEC, np.random.default_rng())
    request = fake_request("r", [4, 5, 6], adapter, sampling=SamplingParams(max_tokens=4, temperature=0.0))
    run(backend, [(request, adapter)], None)
    assert places() == before


def test_a_layer_is_five_calls_of_kernels() -> None:
    """In the loop's body, once for all layers; the embedding and the logits are one each."""
    backend = tiny_backend(CONFIG.on(XlaConfig(form="cpu", skip_precompile=True)), SPEC)
    calls = re.findall(r'custom_call_target="polylora_(\w+)"', backend.hlo(backend.programs.buckets[0]))
    assert sorted(calls) == [
        "add_product", "add_product", "attend", "embed", "logits", "norm_gated", "norm_qkv",
    ]  # fmt: skip
    backend.close()


def test_extras_are_refused_by_name_where_there_is_no_memory_for_them() -> None:
    plain = random_adapter(SPEC, 4)
    key = next(iter(plain.weights))
    biases = {key: np.ones(SPEC.target_shape(*key[:2])[1], np.float32)}
    adapter = dataclasses.replace(plain, delta_biases=biases)
    config = CONFIG.on(XlaConfig(form="xla", skip_precompile=True)).model_copy(update={"adapter_extra_bytes": 0})
    backend = tiny_backend(config, SPEC)
    with pytest.raises(AdapterMismatch, match="adapter_extra_bytes 0 cannot apply lora_bias"):
        backend.write_adapter(1, 0, adapter)
    backend.close()


def test_an_adapter_for_a_deeper_model_is_refused_by_name(backend: JaxBackend) -> None:
    with pytest.raises(AdapterMismatch, match="in layer 2"):
        backend.write_adapter(1, 0, random_adapter(tiny_spec(3), 4))
