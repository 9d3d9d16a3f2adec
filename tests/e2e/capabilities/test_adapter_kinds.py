"""Every kind of adapter that PEFT saves gives PEFT's probabilities through the whole service."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.variants import calculate_alora_offsets

from tests.e2e.capabilities.conftest import TOLERANCE, Company, Project, expected_logprobs, polylora
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS
from tests.engine.adapters.parity import save_random_adapter

pytestmark = PEFT_WARNINGS

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = [9, 5, 60, *np.random.default_rng(7).integers(3, 250, 40).tolist(), 9, 60]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ALL},
    "rslora": {"target_modules": ALL, "use_rslora": True},
    "dora": {"target_modules": ALL, "use_dora": True},
    "biases": {"target_modules": ALL, "lora_bias": True},
    "token-rows": {"target_modules": ["q_proj"], "trainable_token_indices": [9, 5, 60]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "whole-modules": {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]},
}


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 2} | copy.deepcopy(options)))


def under_peft(model: Any, folder: Path) -> Any:
    return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def check(project: Project, name: str, expected: np.ndarray, company: Company) -> None:
    """The service's probabilities are the expected ones, which are not the base model's."""
    found = project.logprobs(name, TOKENS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert np.abs(found - expected_logprobs(company.model, TOKENS)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_each_kind(kind: str, company: Company, project: Project) -> None:
    torch.manual_seed(3)
    save_random_adapter(company.model, project.folder / kind, config(**KINDS[kind]))
    project.load(kind)
    check(project, kind, expected_logprobs(under_peft(company.model, project.folder / kind), TOKENS), company)


def test_pissa_converted_as_peft_saves_it(company: Company, project: Project, tmp_path: Path) -> None:
    torch.manual_seed(4)
    trained = get_peft_model(copy.deepcopy(company.model), config(target_modules=ALL, init_lora_weights="pissa"))
    trained.peft_config["default"].init_lora_weights = True  # the model's weights are their residual from now on
    trained.save_pretrained(str(tmp_path / "initial"))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    expected = expected_logprobs(trained.eval(), TOKENS)
    trained.save_pretrained(
        project.folder / "pissa", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    project.load("pissa")
    check(project, "pissa", expected, company)


def test_a_quantized_card(company: Company, project: Project, tmp_path: Path) -> None:
    torch.manual_seed(5)
    save_random_adapter(company.model, tmp_path / "float", config(target_modules=ALL))
    card = project.folder / "card.lora.arrow"
    polylora("convert", tmp_path / "float", card, "--quantize", "int8")
    polylora("convert", card, tmp_path / "rounded")
    project.load("card", card.name)
    check(project, "card", expected_logprobs(under_peft(company.model, tmp_path / "rounded"), TOKENS), company)


def test_an_activated_adapter_leaves_what_is_before_its_invocation(company: Company, project: Project) -> None:
    torch.manual_seed(6)
    invocation = TOKENS[20:23]
    alora = config(target_modules=ALL, alora_invocation_tokens=invocation)
    save_random_adapter(company.model, project.folder / "alora", alora)
    project.load("alora")
    peft = under_peft(company.model, project.folder / "alora")
    offsets = calculate_alora_offsets(peft.peft_config, "default", torch.tensor([TOKENS]))
    expected = expected_logprobs(peft, TOKENS, alora_offsets=offsets)
    check(project, "alora", expected, company)
    base = expected_logprobs(company.model, TOKENS)
    np.testing.assert_allclose(project.logprobs("alora", TOKENS)[:19], base[:19], rtol=0, atol=TOLERANCE)
