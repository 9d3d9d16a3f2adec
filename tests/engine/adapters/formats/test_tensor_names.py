"""Names that wrappers, trainers and multimodal models give to an adapter's tensors: the same adapter under each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.engine.adapters.features import FEATURES, RESIZED
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.formats.tensor_names import plain_names
from app.engine.errors import AdapterFormatError, AdapterMismatch
from app.engine.models.linear_modules import target_shape
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, tiny_spec, write_peft

SPEC = tiny_spec()
PEFT = "base_model.model.model."

#: A wrapper: what it makes of PEFT's own name.
WRAPPERS: dict[str, Callable[[str], str]] = {
    "without PEFT's prefix": lambda name: name.removeprefix("base_model.model."),
    "without the head": lambda name: name.replace(PEFT, "base_model.model."),
    "bare": lambda name: name.removeprefix(PEFT),
    "PEFT twice": lambda name: f"base_model.model.{name}",
    "language_model": lambda name: name.replace(PEFT, "base_model.model.language_model.model."),
    "model.language_model": lambda name: name.replace(PEFT, "base_model.model.model.language_model."),
    "model.language_model without PEFT": lambda name: name.replace(PEFT, "model.language_model."),
    "another wrapper": lambda name: name.replace(PEFT, "base_model.model.thinker.model."),
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled inside": lambda name: name.replace(PEFT, "base_model.model._orig_mod.model."),
    "compiled layers": lambda name: name.replace(".self_attn.", "._orig_mod.self_attn."),
    "data parallel": lambda name: f"module.{name}",
    "sharded": lambda name: name.replace(".layers.0.", ".layers.0._fsdp_wrapped_module."),
    "checkpointed": lambda name: name.replace(".layers.1.", ".layers.1._checkpoint_wrapped_module."),
    "adapter's name": lambda name: name.replace(".weight", ".default.weight"),
    "another adapter's name": lambda name: name.replace(".weight", ".sql-2.weight"),
    "all": lambda name: "module._orig_mod." + name.replace(PEFT, f"{PEFT}language_model.").replace(".w", ".sql.w"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_adapter_is_the_same_under_every_wrapper(tmp_path: Path, wrapper: str) -> None:
    tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj", "up_proj"]))
    config = peft_config(2, ["q_proj", "up_proj"], lora_alpha=6)
    renamed = {WRAPPERS[wrapper](name): tensor for name, tensor in tensors.items()}
    assert not set(renamed) & set(tensors) or "ed" in wrapper
    plain, wrapped = (
        read_adapter(write_peft(tmp_path / folder, config, named), SPEC).card.digest
        for folder, named in (("plain", tensors), ("wrapped", renamed))
    )
    assert wrapped == plain


def test_the_configuration_is_about_the_names_of_training(tmp_path: Path) -> None:
    """Patterns see the module names that the trained model had, as PEFT's did."""
    arrays = random_arrays(SPEC, 2, ["q_proj"]) | random_arrays(tiny_spec(1), 3, ["up_proj"])
    matrix = np.ones((SPEC.vocab_size, SPEC.hidden_size), "f4")
    tensors = peft_tensors(arrays) | {f"{PEFT}embed_tokens.weight": matrix}
    renamed = {name.replace(PEFT, "base_model.model.model.language_model."): one for name, one in tensors.items()}
    config = peft_config(
        2,
        target_modules=r"^(?!.*visual).*language_model\.layers\.(\d+\.self_attn\.q|0\.mlp\.up)_proj",
        rank_pattern={r"^model\.language_model\.layers\.0\.mlp\.up_proj": 3},
        exclude_modules=["model.layers.0.self_attn.q_proj"],  # no module of that model
        modules_to_save=["model.language_model.embed_tokens"],
    )
    adapter = read_adapter(write_peft(tmp_path / "it", config, renamed), SPEC, supported_features=FEATURES)
    assert {(key.layer, key.target) for key in adapter.weights} == set(arrays)
    assert set(adapter.replaced) >= {"model.embed_tokens.weight"}
    with pytest.raises((AdapterFormatError, AdapterMismatch)):
        read_adapter(write_peft(tmp_path / "other", config, tensors), SPEC, supported_features=FEATURES)


def test_a_module_that_is_saved_whole_by_its_full_name_in_training_has_no_lora(tmp_path: Path) -> None:
    arrays = random_arrays(SPEC, 2, ["q_proj"]) | random_arrays(tiny_spec(1), 3, ["up_proj"])
    whole = "layers.1.mlp.up_proj.weight"
    matrix = np.ones(target_shape(SPEC, 1, "up_proj")[::-1], "f4")
    tensors = peft_tensors(arrays) | {f"{PEFT}{whole}": matrix}
    renamed = {name.replace(PEFT, "base_model.model.model.language_model."): one for name, one in tensors.items()}
    config = peft_config(
        2,
        ["q_proj", "up_proj"],
        rank_pattern={"up_proj": 3},
        modules_to_save=["model.language_model.layers.1.mlp.up_proj"],
    )
    adapter = read_adapter(write_peft(tmp_path, config, renamed), SPEC, supported_features=FEATURES)
    assert {(key.layer, key.target) for key in adapter.weights} == set(arrays)
    assert set(adapter.replaced) == {f"model.{whole}"}


def _both(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Layer 1 under another prefix."""
    return {name.replace(PEFT, prefix) if ".layers.1." in name else name: one for name, one in tensors.items()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda ts: _both(ts, "base_model.model.language_model.model."),
            ["begin in 2 ways", "'model.'", "'language_model.model.'", "layers.0.self_attn", "layers.1.self_attn"],
        ),
        (lambda ts: ts | _both(ts, "base_model.model.visual."), ["visual.layers.1", "does not exist"]),
        (
            lambda ts: ts | {name.replace(PEFT, "base_model.model.vision_tower.encoder."): t for name, t in ts.items()},
            ["vision_tower.encoder.layers", "does not exist"],
        ),
        (
            lambda ts: {
                name.replace(".weight", f".{'a' if '.0.' in name else 'b'}.weight"): t for name, t in ts.items()
            },
            ["2 adapters", "'a'", "'b'", "save one of them"],
        ),
        (lambda ts: ts | {f"module.{name}": t for name, t in ts.items()}, ["is there twice", "module."]),
    ],
)
def test_names_that_no_single_mapping_fits_are_listed(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], says: list[str]
) -> None:
    tensors = change(peft_tensors(random_arrays(SPEC, 2, ["q_proj"])))
    with pytest.raises((AdapterFormatError, AdapterMismatch)) as caught:
        read_adapter(write_peft(tmp_path, peft_config(2, ["q_proj"]), tensors), SPEC)
    for words in says:
        assert words in str(caught.value)


def test_an_encoder_inside_another_model_keeps_its_names() -> None:
    name = "base_model.model.bert.encoder.layer.3.attention.self.query.lora_A.weight"
    found = plain_names([name])
    assert found.plain[name] == "encoder.layer.3.attention.self.query.lora_A.weight"
    assert found.name_in_training("encoder.layer.3.attention.self.query") == "bert.encoder.layer.3.attention.self.query"


@pytest.mark.parametrize("shape", [(0,), (0, 24), (2, 0)])
def test_tensors_that_zero3_left_empty_are_diagnosed(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {name: np.zeros(shape, "f4") for name in peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))}
    with pytest.raises(AdapterFormatError, match=r"4 of 4 tensors are empty.*ZeRO-3.*zero_to_fp32\.py"):
        read_adapter(write_peft(tmp_path, peft_config(2, ["q_proj"]), tensors), SPEC)


V, H = SPEC.vocab_size, SPEC.hidden_size


_BOTH = {f"{PEFT}embed_tokens.weight": (V + 2, H), "base_model.model.lm_head.weight": (V + 2, H)}
_ROWS = "token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("options", "extra", "missing"),
    [
        ({"modules_to_save": ["embed_tokens"]}, {f"{PEFT}embed_tokens.weight": (V + 2, H)}, f"lm_head for token {V}"),
        (
            {"modules_to_save": ["lm_head"]},
            {"base_model.model.lm_head.weight": (V + 2, H)},
            f"embed_tokens for token {V}",
        ),
        ({}, _BOTH, None),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            {f"{PEFT}embed_tokens.lora_embedding_A": (2, V + 2), f"{PEFT}embed_tokens.lora_embedding_B": (H, 2)},
            f"embed_tokens for token {V}",
        ),
        (
            {"trainable_token_indices": {"embed_tokens": [V, V + 1], "lm_head": [V, V + 1]}},
            {f"{PEFT}embed_tokens.{_ROWS}": (2, H), f"base_model.model.lm_head.{_ROWS}": (2, H)},
            None,
        ),
        (
            {"trainable_token_indices": {"embed_tokens": [V + 1, 3], "lm_head": [V, V + 1]}},
            {f"{PEFT}embed_tokens.{_ROWS}": (2, H), f"base_model.model.lm_head.{_ROWS}": (2, H)},
            f"embed_tokens for token {V}",
        ),
    ],
)
def test_a_vocabulary_that_grew_has_all_its_rows(
    tmp_path: Path, options: dict[str, Any], extra: dict[str, tuple[int, ...]], missing: str | None
) -> None:
    config = peft_config(2, ["q_proj"]) | options
    tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj"])) | {
        name: np.ones(shape, "f4") for name, shape in extra.items()
    }
    folder = write_peft(tmp_path, config, tensors)
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": V, "</tool>": V + 1}))
    if missing is None:
        adapter = read_adapter(folder, SPEC, supported_features=FEATURES)
        assert adapter.card.vocab_size == V + 2
        with pytest.raises(AdapterMismatch, match="cannot apply a resized vocabulary"):
            read_adapter(folder, SPEC, supported_features=FEATURES - {RESIZED})
    else:
        with pytest.raises(AdapterMismatch, match=rf"after 2 tokens were added.*no row of {missing} \('<tool>'\)"):
            read_adapter(folder, SPEC, supported_features=FEATURES)


@pytest.mark.parametrize("num_rows", [V - 1, V + 1])
def test_ends_of_two_sizes_are_refused(tmp_path: Path, num_rows: int) -> None:
    tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj"])) | {
        name: np.ones((count, H), "f4") for name, count in zip(_BOTH, (V, num_rows), strict=True)
    }
    folder = write_peft(tmp_path, peft_config(2, ["q_proj"]), tensors)
    with pytest.raises(AdapterMismatch, match=f"has {num_rows} rows, but .* {V}|has {V} rows, but .* {num_rows}"):
        read_adapter(folder, replace(SPEC, tie_embeddings=False), supported_features=FEATURES)
