"""The JAX backend through the engine: no compilation by adapters, the same answers in any batch, donated memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.extra_weights import extra_bytes
from app.engine.config import EngineConfig, XlaConfig
from app.engine.engine import Engine
from app.engine.errors import AdapterMismatch
from app.engine.models.linear_modules import DENSE_TARGETS
from app.engine.request import GenerateRequest, SamplingParams, TokenLogprobs
from app.engine.xla.backend import XlaBackend
from tests.engine.adapters.random_adapters import random_adapter, tiny_spec
from tests.engine.xla.tiny_backends import counting_compilations, tiny_backend
from tests.fakes import fake_request
from tests.seeds import rng

SPEC = tiny_spec()
#: Of log-probabilities that are the same up to rounding.
TOLERANCE = 1e-4
CONFIG = EngineConfig(
    num_kv_blocks=48, lora_pool_rows=128, max_loras=8, max_num_batched_tokens=64, max_num_seqs=8,
    extra_weights_bytes=20_000,
)  # fmt: skip


@pytest.fixture(scope="module", params=["xla", "pallas"])
def backend(request: pytest.FixtureRequest) -> Iterator[XlaBackend]:
    """One backend per kernel backend for the module: compiling it is the expensive part."""
    made = tiny_backend(CONFIG.on(XlaConfig(kernel_backend=request.param)), SPEC)
    made.programs.wait()
    yield made
    made.close()


def run(
    backend: XlaBackend, requests: list[tuple[GenerateRequest, LoraAdapter | None]], stagger: np.random.Generator | None
) -> dict[str, list[TokenLogprobs]]:
    """Every request's tokens with their log-probabilities, submitted together or at random steps."""
    for adapter_slot in range(1, CONFIG.max_loras):
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
    generator = rng()
    sizes = {key: pair.b.shape[1] for key, pair in adapter.weights.items()}
    vectors = [
        {key: generator.normal(1, 0.3, size).astype(np.float32) for key, size in sizes.items()} for _ in range(2)
    ]
    changed = dataclasses.replace(adapter, magnitudes=vectors[0], delta_biases=vectors[1])
    card = dataclasses.replace(
        adapter.card, digest=f"{adapter.card.digest} scaled", extra_bytes=extra_bytes(changed, SPEC)
    )
    return dataclasses.replace(changed, card=card)


def test_a_hundred_adapters_of_any_rank_compile_nothing(backend: XlaBackend) -> None:
    generator = rng()
    assert len(backend.programs.compile_s_by_bucket) == len(backend.programs.buckets)
    took_s = backend.compile_s
    assert took_s >= backend.programs.compile_s > 0
    ranks = [1, 64, *generator.integers(1, 65, 98).tolist()]
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, num_logprobs=0)
    requests = []
    for number, rank in enumerate(ranks):
        targets = generator.choice(DENSE_TARGETS, int(generator.integers(1, 8)), replace=False).tolist()
        prompt = generator.integers(0, 64, int(generator.integers(1, 30))).tolist()
        adapter = random_adapter(SPEC, rank, targets, dtype=["F32", "BF16"][number % 2])
        if number % 3 == 0:
            adapter = scaled_and_shifted(adapter)
        requests.append((fake_request(f"r{number}", prompt, adapter, sampling=sampling), adapter))
    requests += [(fake_request(f"base{n}", [n + 3], sampling=sampling), None) for n in range(5)]
    with counting_compilations() as count:
        # The counter itself must count: a new shape compiles.
        jax.jit(lambda x: x + 1).lower(jnp.zeros(int(generator.integers(1000, 2000)))).compile()
        seen = count.num_compiled
        assert seen > 0
        out = run(backend, requests, generator)
        assert count.num_compiled == seen
    assert backend.compile_s == took_s
    assert all(len(lines) == 3 for lines in out.values())
    assert len(backend.programs.compile_s_by_bucket) == len(backend.programs.buckets)


def test_a_request_has_the_same_answer_alone_and_in_any_batch(backend: XlaBackend) -> None:
    """Up to rounding: sums that XLA adds are no promise about bits."""
    generator = rng()
    kinds = [(1, "BF16"), (8, "F32"), (21, "BF16"), (64, "F32")]
    adapters = [None, *(random_adapter(SPEC, rank, dtype=dtype) for rank, dtype in kinds)]
    adapters += [scaled_and_shifted(random_adapter(SPEC, rank)) for rank in (3, 16)]
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, num_logprobs=2)
    requests = []
    for number in range(14):
        adapter = adapters[int(generator.integers(len(adapters)))]
        # Prompts of few tokens share prefixes; 60 tokens span several chunks of the step.
        length = int(generator.choice([1, 5, 17, 40, 60]))
        prompt = np.concatenate([np.full(length // 2, 5), generator.integers(3, 64, length - length // 2)])
        requests.append((fake_request(f"r{number}", prompt.tolist(), adapter, sampling=sampling), adapter))
    together = run(backend, requests, generator)
    num_compared = 0
    for request, adapter in requests[:7]:
        alone = run(backend, [(request, adapter)], None)
        for one, other in zip(alone[request.request_id], together[request.request_id], strict=True):
            num_compared += 1
            if one.token_id != other.token_id:
                assert one.top[0][1] - one.top[1][1] < 2 * TOLERANCE, "a tie"
                break
            assert abs(one.logprob - other.logprob) <= TOLERANCE
    assert num_compared > 40


def test_the_rows_of_an_adapter_are_where_the_engine_says_and_nobody_elses_change(backend: XlaBackend) -> None:
    before = jax.tree.map(np.array, backend._tables)
    adapter = scaled_and_shifted(random_adapter(SPEC, 11))
    backend.write_adapter(3, 32, adapter)
    after = jax.tree.map(np.array, backend._tables)
    for name in ("a", "b"):
        for target, rows in getattr(after, name).items():
            old = getattr(before, name)[target]
            np.testing.assert_array_equal(rows[:, :32], old[:, :32])
            np.testing.assert_array_equal(rows[:, 48:], old[:, 48:])
            assert rows[:, 32:43].any(axis=(1, 2)).all()
    for name in ("scales", "shifts"):
        for module, rows in getattr(after, name).items():
            old = getattr(before, name)[module]
            np.testing.assert_array_equal(np.delete(rows, 4, axis=1), np.delete(old, 4, axis=1))
            assert (rows[:, 4] != old[:, 4]).any()
    backend.write_adapter(3, 32, random_adapter(SPEC, 11))
    for table in backend._tables.scales.values():
        assert (np.asarray(table)[:, 4] == 1).all(), "forgotten with the adapter before"


def test_writing_and_serving_reuse_the_same_memory(backend: XlaBackend) -> None:
    def places() -> list[int]:
        return [array.unsafe_buffer_pointer() for array in jax.tree.leaves((backend._tables, backend._kv))]

    before = places()
    adapter = scaled_and_shifted(random_adapter(SPEC, 5))
    request = fake_request("r", [4, 5, 6], adapter, sampling=SamplingParams(max_tokens=4, temperature=0.0))
    run(backend, [(request, adapter)], None)
    assert places() == before


def test_an_adapter_for_a_deeper_model_is_refused_by_name(backend: XlaBackend) -> None:
    with pytest.raises(AdapterMismatch, match="in layer 2"):
        backend.write_adapter(1, 0, random_adapter(tiny_spec(3), 4))
