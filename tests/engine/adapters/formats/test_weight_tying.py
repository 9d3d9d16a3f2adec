"""`ensure_weight_tying` on a tied base: what PEFT makes of it, and what a file that contradicts it is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.errors import AdapterFormatError
from tests.engine.adapters.formats.test_peft_files import PREFIX, Tensors, changed, logits, model_of, saved
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS, TOLERANCE
from tests.engine.adapters.parity import our_logits, peft_logits, random_tokens, spec_of

pytestmark = PEFT_WARNINGS
HEAD, EMBEDDING = f"{PREFIX}lm_head", f"{PREFIX}model.embed_tokens"

TIED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"], "lora_alpha": 3},
    "both, another rank for the head": {
        "target_modules": ["q_proj", "embed_tokens", "lm_head"],
        "rank_pattern": {"embed_tokens": 3, "lm_head": 2},
        "alpha_pattern": {"lm_head": 5},
    },
    "rank of the embedding alone, rsLoRA": {
        "target_modules": ["q_proj", "embed_tokens"],
        "rank_pattern": {"embed_tokens": 2},
        "use_rslora": True,
    },
    "pattern": {"target_modules": ".*(q_proj|embed_tokens)"},
    "embedding saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [5, 9]}},
}


def tied(folder: Path, name: str) -> Path:
    options = {key: list(value) if isinstance(value, list) else value for key, value in TIED[name].items()}
    return saved(folder, "tied", ensure_weight_tying=True, **options)


@pytest.mark.parametrize("name", TIED)
def test_both_ends_are_what_peft_makes_of_them(tmp_path: Path, name: str) -> None:
    folder = tied(tmp_path, name)
    ours, theirs = logits("tied", folder)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("left_out", [HEAD, EMBEDDING])
@pytest.mark.parametrize("name", ["embedding", "head saved"])
def test_a_file_with_one_end_means_both(tmp_path: Path, name: str, left_out: str) -> None:
    folder = tied(tmp_path, name)
    model, tokens = model_of("tied"), random_tokens(model_of("tied"))
    theirs = peft_logits(model, folder, tokens)

    def without(tensors: Tensors) -> Tensors:
        return {key: tensor for key, tensor in tensors.items() if not key.startswith(left_out)}

    adapter = read_adapter(changed(folder, without), spec_of(model), supported_features=FEATURES)
    np.testing.assert_allclose(our_logits(model, adapter, tokens), theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("embedding", f"{HEAD}.lora_B.weight", "LoRA"),
        ("head", f"{HEAD}.lora_A.weight", "LoRA"),
        ("embedding saved", f"{HEAD}.weight", "weight"),
    ],
)
def test_ends_that_differ_are_refused(tmp_path: Path, name: str, tensor: str, what: str) -> None:
    folder = changed(tied(tmp_path, name), lambda tensors: tensors | {tensor: tensors[tensor] * 2})
    with pytest.raises(AdapterFormatError, match=rf"the {what} of 'model.embed_tokens' is not that of 'lm_head'"):
        read_adapter(folder, spec_of(model_of("tied")), supported_features=FEATURES)


def test_rows_of_other_tokens_at_either_end_are_refused(tmp_path: Path) -> None:
    rows = {"embed_tokens": [5, 9], "lm_head": [5, 8]}
    folder = saved(tmp_path, "tied", trainable_token_indices=rows)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"ensure_weight_tying": True}))  # PEFT would not have saved it
    with pytest.raises(
        AdapterFormatError, match="ensure_weight_tying is true, but trainable_token_indices names other"
    ):
        read_adapter(folder, spec_of(model_of("tied")), supported_features=FEATURES)
    path.write_text(json.dumps(config))
    read_adapter(folder, spec_of(model_of("tied")), supported_features=FEATURES)


@pytest.mark.parametrize("name", TIED)
def test_both_ends_survive_conversion_without_a_base(tmp_path: Path, name: str) -> None:
    folder = tied(tmp_path / "it", name)
    known, unknown = (read_raw_adapter(folder, spec) for spec in (spec_of(model_of("tied")), None))
    assert known.modules == unknown.modules
    assert known.token_rows == unknown.token_rows
    assert dict(known.parameters) == dict(unknown.parameters)
    assert len(load_file(folder / "adapter_model.safetensors")) > 2


def test_an_untied_base_is_not_changed(tmp_path: Path) -> None:
    for name, options in TIED.items():
        if "modules_to_save" in options or "trainable_token_indices" in options or "head" in name:
            continue
        folder = saved(tmp_path / name, "untied", ensure_weight_tying=True, **options)
        ours, theirs = logits("untied", folder)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
