"""Mixtures of experts of every family, with adapters of attention and of experts, give PEFT's probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from load_tests.service import free_port
from tests.e2e.capabilities.conftest import TOLERANCE, Project, expected_logprobs
from tests.e2e.capabilities.test_adapter_kinds import under_peft
from tests.e2e.process import polylora_serve, tiny_document
from tests.engine.adapters.moe_parity import FORMATS, PEFT_WARNINGS, save_random, tiny_mixture
from tests.engine.served import write_tokenizer

#: A service for each; tests/engine/adapters/formats/test_moe_parity.py has every family and format by day.
pytestmark = [pytest.mark.nightly, *PEFT_WARNINGS]

TOKENS = np.random.default_rng(11).integers(3, 96, 30).tolist()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2"])
def test_a_mixture_and_its_adapters(family: str, tmp_path: Path) -> None:
    torch.manual_seed(12)
    model = tiny_mixture(family)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    names = {"attention": "attention", "experts": "all experts"}
    for name, kind in names.items():
        save_random(model, tmp_path / "loras" / name, FORMATS[kind])
    port = free_port()
    engine = {"cpu": {"num_threads": 1}, "num_kv_blocks": 64, "lora_pool_rows": 256}
    process = polylora_serve(tiny_document(port, tmp_path, engine, preload=list(names)), port)
    try:
        process.wait_until_said("Ready after", 600)
        caller = Project("", process.url, "none", tmp_path / "loras")
        base = expected_logprobs(model, TOKENS)
        np.testing.assert_allclose(caller.logprobs("tiny", TOKENS), base, rtol=0, atol=TOLERANCE)
        for name in names:
            expected = expected_logprobs(under_peft(model, tmp_path / "loras" / name), TOKENS)
            assert np.abs(expected - base).max() > 100 * TOLERANCE
            np.testing.assert_allclose(caller.logprobs(name, TOKENS), expected, rtol=0, atol=TOLERANCE)
    finally:
        process.stop()
