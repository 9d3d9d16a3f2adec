"""One mixture of experts on 1, 2, 4 and 8 devices, divided by experts, by their columns, and by both: the same answers,
and no communication beyond the base model's. In a process of its own, as `test_tensor_parallel`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest

from app.engine.adapters.adapter import LoraAdapter
from app.engine.config import EngineConfig, XlaConfig
from app.engine.engine import Engine
from app.engine.errors import ConfigError
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
from app.engine.request import SamplingParams
from app.engine.xla.backend import XlaBackend
from app.engine.xla.sharding import make_mesh
from app.engine.xla.sizes import sizes_of
from tests.engine.adapters.random_adapters import random_mixture_adapter, random_tensors, tiny_spec
from tests.engine.xla.test_tensor_parallel import COLLECTIVE, ROOT
from tests.fakes import fake_request
from tests.seeds import any_seed


def spec(*, is_mixed: bool = False) -> ModelSpec:
    """8 experts, two of them a token's, beside a shared one; norms over all heads; fewer KV heads than 8 devices.

    is_mixed: with a dense layer in front.
    """
    rope = RopeSpec((1.0, 0.1, 0.01, 0.001))
    attention = AttentionSpec(8, 4, 8, 8**-0.5, rope, qk_norm=True, whole_qk_norm=True)
    shared = SharedExpertSpec("shared_expert", MlpSpec(32), is_gated=True)
    mixed = LayerSpec(attention, MlpSpec(48), ExpertsSpec(RouterSpec(8, 2, normalised=True), shared))
    layers = (LayerSpec(attention, MlpSpec(40)), mixed, mixed) if is_mixed else (mixed, mixed)
    return ModelSpec("tiny", "qwen2_moe", "base", 61, 24, 64, 1e-5, True, layers, 1, (2,))


def sinks_spec() -> ModelSpec:
    """Sinks, windows in every other layer, biases everywhere, and clamped experts."""
    rope = RopeSpec((1.0, 0.1, 0.01, 0.001))
    whole = AttentionSpec(8, 4, 8, 8**-0.5, rope, qkv_bias=True, o_bias=True, sinks=True)
    windowed = dataclasses.replace(whole, window=2)
    router = RouterSpec(8, 2, normalised=True, name="router", has_bias=True)
    mlp, experts = MlpSpec(48, bias=True, limit=0.5, alpha=1.702), ExpertsSpec(router, alternates=True)
    layers = (LayerSpec(windowed, mlp, experts), LayerSpec(whole, mlp, experts))
    return ModelSpec("tiny", "gpt_oss", "base", 61, 24, 64, 1e-5, False, layers, 1, (2,))


def latent_spec() -> ModelSpec:
    """Latent attention with latents of queries, a dense layer, then experts in groups beside a shared one."""
    latent = LatentSpec(kv_rank=32, key_size=16, rope_size=6, value_size=16, query_rank=20, norm_eps=1e-6)
    attention = AttentionSpec(8, 8, 22, 22**-0.5, RopeSpec((1.0, 0.1, 0.01)), latent=latent)
    router = RouterSpec(8, 2, normalised=False, scale=1.5, num_groups=4, top_groups=2)
    mixture = ExpertsSpec(router, SharedExpertSpec("shared_experts", MlpSpec(32), is_gated=False))
    layers = (LayerSpec(attention, MlpSpec(40)), LayerSpec(attention, MlpSpec(48), mixture))
    return ModelSpec("tiny", "deepseek_v2", "base", 61, 24, 64, 1e-5, False, layers, 1, (2,))


#: By name.
MODELS = {"shared": spec, "mixed": partial(spec, is_mixed=True), "sinks": sinks_spec, "latent": latent_spec}


def observe(kernel_backend: str, experts: int, tensor: int, rank_rows: int, seed: int, name: str) -> dict[str, object]:
    """Tokens and log-probabilities of a few requests, and the collectives in the program that computed them."""
    model = MODELS[name]()
    xla = XlaConfig.model_validate(
        {
            "kernel_backend": kernel_backend,
            "tensor_parallel": tensor,
            "expert_parallel": experts,
            "skip_precompile": True,
        }
    )
    config = EngineConfig(
        num_kv_blocks=16, lora_pool_rows=rank_rows, max_loras=5, max_num_batched_tokens=32, max_num_seqs=8,
        extra_weights_bytes=1 << 22 if rank_rows else 0, xla=xla,
    )  # fmt: skip
    mesh = make_mesh(jax.devices("cpu"), tensor, experts)
    backend = XlaBackend(model, random_tensors(model, seed), config, mesh)
    engine = Engine(backend, config)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, num_logprobs=0)
    adapters: list[LoraAdapter | None] = [None]
    if rank_rows:
        generator = np.random.default_rng(seed)
        for number, rank in enumerate((3, 18)):
            adapter = random_mixture_adapter(model, rank, generator)
            adapters.append(dataclasses.replace(adapter, card=dataclasses.replace(adapter.card, digest=f"a{number}")))
    for number, own in enumerate(adapters):
        engine.submit(fake_request(f"r{number}", [5 + number, 7, 9], own, sampling=sampling), own)
    lines: dict[str, list[object]] = {}
    while engine.has_work:
        for chunk in engine.step():
            assert chunk.error is None, chunk.error
            lines.setdefault(chunk.request_id, []).extend((line.token_id, line.logprob) for line in chunk.logprobs)
    text = backend.programs.program(backend.programs.buckets[-1]).as_text()  # the bucket of the prompts
    backend.close()
    return {"lines": lines, "collectives": sorted(match[1] for match in COLLECTIVE.finditer(text))}


@pytest.mark.nightly  # by day test_sharding.py and test_expert_adapters.py have the parts of each device
def test_the_same_tokens_and_no_more_communication_by_experts_columns_and_both() -> None:
    code = (
        "import json, sys; from tests.engine.xla.test_expert_parallel import observe; "
        "print(json.dumps([observe(*case) for case in json.loads(sys.argv[1])]))"
    )
    seed = any_seed()
    #: Kernel backend, expert parallel, tensor parallel, rank rows, seed, model.
    cases = [("xla", experts, tensor, 48, seed, "shared") for experts, tensor in ((1, 1), (2, 1), (1, 4), (4, 2))]
    cases += [("xla", 4, 2, 0, seed, "shared"), ("pallas", 8, 1, 48, seed, "shared")]
    cases += [("xla", 1, 1, 48, seed, "mixed"), ("xla", 2, 2, 48, seed, "mixed")]
    cases += [("xla", 1, 1, 48, seed, "sinks"), ("xla", 2, 2, 48, seed, "sinks"), ("xla", 4, 2, 48, seed, "sinks")]
    cases += [("xla", 1, 1, 48, seed, "latent"), ("xla", 2, 1, 48, seed, "latent"), ("xla", 2, 4, 48, seed, "latent")]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, json.dumps(cases)]
    process = subprocess.run(command, cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    alone = [0, 6, 8, 11]
    assert all(found[case]["collectives"] == [] for case in alone)
    split_cases = [[*found[1:4], found[5]], [found[7]], found[9:11], found[12:]]
    for whole, splits in zip([found[case] for case in alone], split_cases, strict=True):
        assert len(whole["lines"]) == 3
        for split in splits:
            assert split["lines"].keys() == whole["lines"].keys()
            for name, lines in whole["lines"].items():
                for (token, logprob), (found_token, found_logprob) in zip(lines, split["lines"][name], strict=True):
                    assert abs(logprob - found_logprob) <= 1e-4
                    if token != found_token:
                        break  # both are likeliest: a tie, after which the answers are two
    # In the layers' one loop body: a sum for the norms, after o, after the shared expert's down and after the experts;
    # XLA may make one of the last two. Then the logits' parts put together. The fifth has no adapter tables.
    for split in found[1:6]:
        assert split["collectives"] in (["all-gather", *["all-reduce"] * 3], ["all-gather", *["all-reduce"] * 4])
    assert found[3]["collectives"] == found[4]["collectives"]
    mixed = found[7]["collectives"]  # one more after the dense layer's down
    assert mixed in (["all-gather", *["all-reduce"] * 4], ["all-gather", *["all-reduce"] * 5])
    for split in found[9:11]:  # after o, and after the experts
        assert split["collectives"] == ["all-gather", *["all-reduce"] * 2]
    for split in found[12:]:  # after o, after the dense layer's down, after the shared expert's and after the experts
        assert split["collectives"] in (["all-gather", *["all-reduce"] * 3], ["all-gather", *["all-reduce"] * 4])


def test_what_does_not_divide_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match=r"expert_parallel 3 does not divide tiny: layers have 8 experts"):
        sizes_of(spec(), 1, 3)
    with pytest.raises(ConfigError, match=r"expert_parallel is 2 but tiny has no experts"):
        sizes_of(tiny_spec(), 1, 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel times expert_parallel, 16 does not divide tiny: o_proj"):
        sizes_of(spec(), 2, 8)
