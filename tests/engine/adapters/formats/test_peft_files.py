"""Files that PEFT applies although it writes them seldom: older names, more tensors than an adapter needs, float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from app.engine.adapters.adapter_builder import build_adapter
from app.engine.adapters.base_weight_dedup import BaseWeightDedup
from app.engine.adapters.features import FEATURES, XLA_FEATURES
from app.engine.adapters.formats.arrow import ArrowCard, read_card, write_card
from app.engine.adapters.formats.convert import write_peft_folder
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.errors import AdapterFormatError, AdapterMismatch
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.weight_names import LM_HEAD
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS, TOLERANCE
from tests.engine.adapters.parity import our_logits, peft_logits, random_tokens, spec_of, tiny_model
from tests.pairwise import pairwise

pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:Unexpected keyword arguments"),  # of a configuration that PEFT does not know
]
PREFIX = "base_model.model."
Tensors = dict[str, torch.Tensor]


@cache
def model_of(kind: str) -> Any:
    return tiny_model("llama", tie_word_embeddings=kind == "tied")


def saved(folder: Path, kind: str, *, embeddings: bool = False, **options: Any) -> Path:
    """PEFT's own folder of an adapter with random numbers."""
    config = LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "down_proj"]} | options))
    peft_model = get_peft_model(copy.deepcopy(model_of(kind)), config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.15)
    peft_model.save_pretrained(folder, **({"save_embedding_layers": True} if embeddings else {}))
    return folder


def changed(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    return folder


def logits(kind: str, folder: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(ours, PEFT's)"""
    model = model_of(kind)
    tokens = random_tokens(model)
    adapter = read_adapter(folder, spec_of(model), supported_features=FEATURES)
    return our_logits(model, adapter, tokens), peft_logits(model, folder, tokens)


def assert_pefts(kind: str, folder: Path) -> None:
    ours, theirs = logits(kind, folder)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pairwise(
    {
        "kind": ["tied", "untied"],
        "options": [
            {},
            {"modules_to_save": ["lm_head"]},
            {"modules_to_save": ["embed_tokens"]},
            {"modules_to_save": ["embed_tokens", "lm_head"]},
            {"trainable_token_indices": [9, 5]},
            {"target_modules": ["q_proj", "embed_tokens"]},
            {"target_modules": ["q_proj", "lm_head"]},
        ],
        "factor": [1.0, 1.5],
    },
    strength=1,
)
def test_embeddings_that_are_saved_along_are_what_peft_makes_of_them(
    tmp_path: Path, kind: str, options: dict[str, Any], factor: float
) -> None:
    folder = saved(tmp_path / "it", kind, embeddings=True, **options)
    trained = [f"{PREFIX}model.{name}.weight".replace("model.lm", "lm") for name in options.get("modules_to_save", ())]

    def scale(tensors: Tensors) -> Tensors:
        """Times `factor` what stands for the base's matrices, and leave what modules_to_save trained."""
        whole = {name for name, tensor in tensors.items() if tensor.shape[0] == 96 and name not in trained}
        return {name: tensor * factor if name in whole else tensor for name, tensor in tensors.items()}

    assert_pefts(kind, changed(folder, scale))


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_copies_saved_along_leave_a_plain_adapter(tmp_path: Path, kind: str) -> None:
    """So an engine that serves plain adapters alone takes it; with one value changed it is refused by name."""
    model = model_of(kind)
    model.save_pretrained(tmp_path / "base")
    checkpoint = load_checkpoint(tmp_path / "base")
    folder = saved(tmp_path / "it", kind, embeddings=True)
    copies = BaseWeightDedup(checkpoint, XLA_FEATURES)
    lighter = copies.without_copies(read_adapter(folder, checkpoint.spec, supported_features=XLA_FEATURES))
    assert not lighter.features
    assert lighter.card.extra_bytes == 0
    changed(folder, lambda tensors: {name: t * (1.5 if t.shape[0] == 96 else 1) for name, t in tensors.items()})
    with pytest.raises(AdapterMismatch, match="cannot apply trained embedding or trained lm_head"):
        copies.without_copies(read_adapter(folder, checkpoint.spec, supported_features=XLA_FEATURES))


def test_two_ends_that_differ_are_refused_where_the_base_has_one(tmp_path: Path) -> None:
    folder = changed(
        saved(tmp_path, "tied", embeddings=True),
        lambda tensors: tensors | {f"{PREFIX}{LM_HEAD}": tensors[f"{PREFIX}{LM_HEAD}"] * 2},
    )
    with pytest.raises(AdapterFormatError, match="are one matrix in this base, but the file holds two that differ"):
        read_adapter(folder, spec_of(model_of("tied")), supported_features=FEATURES)


def test_a_lone_matrix_needs_its_base_to_be_understood(tmp_path: Path) -> None:
    def without_head(tensors: Tensors) -> Tensors:
        return {name: t for name, t in tensors.items() if name != f"{PREFIX}{LM_HEAD}"}

    for kind in ("tied", "untied"):
        folder = changed(saved(tmp_path / kind, kind, embeddings=True), without_head)
        assert_pefts(kind, folder)
        with pytest.raises(AdapterFormatError, match="name the base with --base"):
            read_raw_adapter(folder, None)


@pytest.mark.parametrize("options", [{}, {"trainable_token_indices": [9, 5]}], ids=str)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_embeddings_saved_along_survive_conversion(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    folder = saved(tmp_path / "it", kind, embeddings=True, **options)
    spec = spec_of(model_of(kind))
    stored = read_raw_adapter(folder, spec)
    write_card(tmp_path / "it.lora.arrow", ArrowCard("it", stored, {}))
    card = read_card(tmp_path / "it.lora.arrow").raw
    write_peft_folder(tmp_path / "again", card)
    digests = {build_adapter(one, spec, supported_features=FEATURES).card.digest for one in (stored, card)}
    assert digests == {read_adapter(folder, spec, supported_features=FEATURES).card.digest}
    if not options:  # PEFT combines no token rows with a module that is saved whole
        model, tokens = model_of(kind), random_tokens(model_of(kind))
        again = read_adapter(tmp_path / "again", spec, supported_features=FEATURES)
        np.testing.assert_array_equal(
            our_logits(model, again, tokens),
            our_logits(model, read_adapter(folder, spec, supported_features=FEATURES), tokens),
        )


@pytest.mark.parametrize(
    ("options", "old", "new"),
    [
        ({}, ".weight", ".default.weight"),
        ({}, "A.weight", "A.default.weight"),
        ({"lora_bias": True}, "lora_B.bias", "lora_B.default.bias"),
        ({"use_dora": True}, "_magnitude_vector", "_magnitude_vector.weight"),
        ({"use_dora": True}, "_magnitude_vector", "_magnitude_vector.default.weight"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "lora_embedding_A", "lora_embedding_A.default"),
    ],
    ids=str,
)
def test_names_that_peft_reads_are_read(tmp_path: Path, options: dict[str, Any], old: str, new: str) -> None:
    folder = saved(tmp_path, "untied", **options)
    digest = read_adapter(folder, spec_of(model_of("untied")), supported_features=FEATURES).card.digest
    changed(folder, lambda tensors: {name.replace(old, new): t for name, t in tensors.items()})
    assert any(new in name for name in load_file(folder / "adapter_model.safetensors"))
    assert_pefts("untied", folder)
    assert read_adapter(folder, spec_of(model_of("untied")), supported_features=FEATURES).card.digest == digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lora_A.weight", "lora_A.sql.weight", "is not understood"),
        ("lora_magnitude_vector", "lora_magnitude_vector.default", "is not understood"),
    ],
)
def test_names_that_peft_drops_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    folder = saved(tmp_path, "untied", use_dora=True)
    changed(folder, lambda tensors: {name.replace(old, new): t for name, t in tensors.items()})
    with pytest.raises(AdapterFormatError, match=message):
        read_adapter(folder, spec_of(model_of("untied")), supported_features=FEATURES)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "untied")
    changed(folder, lambda ts: ts | {name.replace(".weight", ".default.weight"): t.clone() for name, t in ts.items()})
    with pytest.raises(AdapterFormatError, match=r"lora_A\.weight. is there twice"):
        read_adapter(folder, spec_of(model_of("untied")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.norm.weight", "is not selected by bias or modules_to_save"),
        ("lm_head.original_module.weight", "modules_to_save does not name it"),
        ("lm_head.modules_to_save.weight", "modules_to_save does not name it"),
        ("lm_head.token_adapter.base_layer.weight", "comes without its trained rows"),
    ],
)
def test_whole_tensors_that_nothing_asks_for_are_refused(tmp_path: Path, name: str, message: str) -> None:
    folder = changed(saved(tmp_path, "untied"), lambda tensors: tensors | {PREFIX + name: torch.ones(96, 32)})
    with pytest.raises(AdapterFormatError, match=message):
        read_adapter(folder, spec_of(model_of("untied")), supported_features=FEATURES)


def test_float64_is_rounded_as_peft_rounds_it(tmp_path: Path) -> None:
    folder = saved(tmp_path / "it", "untied")
    changed(folder, lambda tensors: {name: t.double() * (1 + 1e-9) for name, t in tensors.items()})
    assert_pefts("untied", folder)
    stored = read_raw_adapter(folder, None)
    write_card(tmp_path / "it.lora.arrow", ArrowCard("it", stored, {}))
    assert read_card(tmp_path / "it.lora.arrow").raw == stored
    changed(folder, lambda tensors: {name: t * 1e300 for name, t in tensors.items()})
    with pytest.raises(AdapterFormatError, match="inf"):
        read_adapter(folder, spec_of(model_of("untied")))


@pytest.mark.parametrize(
    "keys",
    [
        dict.fromkeys(("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "init_lora_weights", "use_qalora")),
        {"enable_lora": None, "merge_weights": False, "of_a_later_version": None},
        {"layers_pattern": "layers", "layers_to_transform": []},
    ],
    ids=str,
)
def test_keys_that_say_nothing_change_nothing(tmp_path: Path, keys: dict[str, object]) -> None:
    folder = saved(tmp_path, "untied")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    assert_pefts("untied", folder)


@pytest.mark.parametrize(
    "keys", [{"of_a_later_version": False}, {"merge_weights": True}, {"enable_lora": [True]}], ids=str
)
def test_keys_that_say_something_unknown_are_refused(tmp_path: Path, keys: dict[str, object]) -> None:
    folder = saved(tmp_path, "untied")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    with pytest.raises(AdapterFormatError, match=next(iter(keys))):
        read_adapter(folder, spec_of(model_of("untied")))
