"""Beyond plain LoRA: what is wrong is named, and nothing is applied by an engine that cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.engine.adapters.adapter_builder import build_adapter
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.arrow import CARD_SUFFIX, ArrowCard, read_card, write_card
from app.engine.adapters.formats.convert import quantize_adapter, write_peft_folder
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.raw_adapter import RawAdapter, RawModule, RawTensor, RawTokenRows, content_digest
from app.engine.errors import AdapterFormatError, AdapterMismatch
from tests.engine.adapters.random_adapters import peft_beyond, stored_tensor, tiny_spec, write_peft

SPEC = tiny_spec()
_P = "base_model.model."
_Q = f"{_P}model.layers.0.self_attn.q_proj"
_ROWS = f"{_P}lm_head.token_adapter.trainable_tokens_delta"
_EMBED = f"{_P}model.embed_tokens"


def _set(name: str, *shape: int, fill: float = 0.0) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: np.full(shape, fill, "f4")})


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        (lambda t: t.pop(f"{_Q}.lora_magnitude_vector"), AdapterFormatError, "has no magnitude"),
        (_set(f"{_Q}.lora_B.bias", 32), AdapterFormatError, "has a bias but 'lora_bias' is false"),
        (_set(f"{_Q}.lora_magnitude_vector", 31), AdapterMismatch, "magnitude is .31"),
        (_set(f"{_Q}.lora_magnitude_vector", 32, fill=np.nan), AdapterFormatError, "magnitude.*nan"),
        (lambda t: t.pop(f"{_P}model.norm.weight"), AdapterFormatError, "model.norm.weight.*not there"),
        (_set(f"{_P}model.norm.weight", 25), AdapterMismatch, "model.norm.weight"),
        (_set(f"{_P}model.norm.weight", 24, fill=np.inf), AdapterFormatError, "model.norm.weight.*inf"),
        (_set(f"{_P}model.layers.0.input_layernorm.weight", 24), AdapterFormatError, "modules_to_save"),
        (_set(f"{_P}model.layers.0.self_attn.q_proj.bias", 32), AdapterFormatError, "modules_to_save"),
        (_set(f"{_Q}.base_layer.weight", 32, 24), AdapterFormatError, "base_layer.weight"),
        (_set(f"{_P}lm_head.base_layer.weight", 64, 24), AdapterFormatError, "base_layer.weight"),
        (_set(f"{_EMBED}.base_layer.weight", 63, 24), AdapterMismatch, "model.embed_tokens.weight' 63; resize both"),
        (lambda t: t.pop(_ROWS), AdapterFormatError, "trainable_token_indices"),
        (_set(_ROWS, 3, 24), AdapterMismatch, "lm_head"),
        (_set(_ROWS, 2, 24, fill=np.nan), AdapterFormatError, "lm_head.*nan"),
        (_set(f"{_EMBED}.token_adapter.trainable_tokens_delta", 2, 24), AdapterFormatError, "does not ask"),
        (lambda t: t.pop(f"{_EMBED}.lora_embedding_B"), AdapterFormatError, "embed_tokens.*lora_B"),
        (_set(f"{_EMBED}.lora_embedding_A", 2, 65), AdapterMismatch, "1 tokens were added.*no row of embed_tokens"),
        (_set(f"{_EMBED}.lora_A.weight", 2, 64), AdapterFormatError, "not understood"),
        (_set(f"{_Q}.lora_embedding_A", 2, 64), AdapterFormatError, "not understood"),
    ],
)
def test_a_tensor_that_is_wrong_is_named(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], error: type[Exception], says: str
) -> None:
    features = ("dora", "saved", "rows") if "magnitude" in says else ("embedding", "saved", "rows")
    config, tensors = peft_beyond(SPEC, features=features)
    good = write_peft(tmp_path / "good", config, tensors)
    assert len(read_adapter(good, SPEC, supported_features=FEATURES).features) == 3
    edit(tensors)
    with pytest.raises(error, match=says):
        read_adapter(write_peft(tmp_path / "bad", config, tensors), SPEC, supported_features=FEATURES)


@pytest.mark.parametrize("key", ["use_dora", "lora_bias"])
def test_an_embedding_takes_plain_lora_only(tmp_path: Path, key: str) -> None:
    feature = key.removeprefix("use_")
    config, tensors = peft_beyond(SPEC, features=(feature, "embedding"))
    part = {"use_dora": "lora_magnitude_vector", "lora_bias": "lora_B.bias"}[key]
    tensors[f"{_EMBED}.{part}"] = np.ones(24, "f4")
    with pytest.raises(AdapterFormatError, match=f"{key}.*embed_tokens"):
        read_adapter(write_peft(tmp_path, config, tensors), SPEC, supported_features=FEATURES)


def _values(*shape: int) -> RawTensor:
    return stored_tensor(np.ones(shape, np.float32))


def _module(path: str, d_in: int, d_out: int, **parts: RawTensor) -> RawModule:
    return RawModule(path, _values(2, d_in), _values(d_out, 2), 2.0, use_rslora=False, **parts)


_PLAIN = _module("model.layers.0.self_attn.q_proj", 24, 32)


@pytest.mark.parametrize(
    ("stored", "error", "says"),
    [
        (RawAdapter((_module("lm_head", 24, 64, magnitude=_values(64)),)), AdapterFormatError, "DoRA on 'lm_head'"),
        (RawAdapter((_module("lm_head", 24, 64, bias=_values(64)),)), AdapterFormatError, "lora_bias on 'lm_head'"),
        (
            RawAdapter((_module("model.embed_tokens", 64, 24, bias=_values(24)),)),
            AdapterFormatError,
            "lora_bias on 'model.embed_tokens'",
        ),
        (
            RawAdapter((_PLAIN,), parameters=((f"{_PLAIN.path}.weight", _values(32, 24)),)),
            AdapterFormatError,
            "q_proj' is replaced as a whole and also has a LoRA",
        ),
        (
            RawAdapter(
                (_module("model.layers.1.self_attn.qkv_proj", 24, 64),),
                parameters=(("model.layers.1.self_attn.v_proj.weight", _values(16, 24)),),
            ),
            AdapterFormatError,
            "v_proj' is replaced as a whole and also has a LoRA",
        ),
        *(
            (RawAdapter((_PLAIN,), token_rows=(RawTokenRows(path, (3,), _values(1, 24)),)), AdapterMismatch, path)
            for path in ("embed_tokens", "model.lm_head", "model.norm")
        ),
    ],
)
def test_what_only_a_card_can_say_and_no_engine_applies_is_refused(
    tmp_path: Path, stored: RawAdapter, error: type[Exception], says: str
) -> None:
    path = tmp_path / f"a{CARD_SUFFIX}"
    write_card(path, ArrowCard("a", stored, {}))
    with pytest.raises(error, match=says):
        read_adapter(path, SPEC, supported_features=FEATURES)


@pytest.mark.parametrize(("ranks", "max_rank"), [((2, None), 2), ((2, 9), 2), ((None, 9), 1), ((9, 2), 9)])
def test_embedding_and_head_take_no_rank_rows(ranks: tuple[int | None, int | None], max_rank: int) -> None:
    places = (("lm_head", ranks[1], 24, 64), (_PLAIN.path, ranks[0], 24, 32))
    modules = [
        RawModule(path, _values(rank, d_in), _values(d_out, rank), 2.0, use_rslora=False)
        for path, rank, d_in, d_out in places
        if rank is not None
    ]
    adapter = build_adapter(RawAdapter(tuple(modules)), SPEC, supported_features=FEATURES)
    assert adapter.card.max_rank == max_rank
    assert (adapter.card.extra_bytes > 0) == (ranks[1] is not None)


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    config, tensors = peft_beyond(SPEC, features=("rows",))
    config["trainable_token_indices"] = {"lm_head": [7, 64]}
    with pytest.raises(AdapterMismatch, match="64"):
        read_adapter(write_peft(tmp_path, config, tensors), SPEC, supported_features=FEATURES)


def test_an_engine_is_never_given_what_it_cannot_apply(tmp_path: Path) -> None:
    folder = write_peft(tmp_path, *peft_beyond(SPEC, features=("dora", "saved")))
    with pytest.raises(AdapterMismatch, match="DoRA or trained norms"):
        read_adapter(folder, SPEC)
    with pytest.raises(AdapterMismatch, match="cannot apply DoRA;"):
        read_adapter(folder, SPEC, supported_features=frozenset({"trained norms"}))


def test_the_digest_covers_every_part(tmp_path: Path) -> None:
    digests = set()
    for features in (("dora",), ("lora_bias", "saved", "rows"), ("embedding",)):
        config, tensors = peft_beyond(SPEC, features=features)
        names = [name for name in tensors if "layers.1" not in name]
        for changed in [None, *names]:
            copies = {name: tensor.copy() for name, tensor in tensors.items()}
            if changed is not None:
                copies[changed].flat[0] += np.float32(0.5)
            folder = write_peft(tmp_path / str(len(digests)), config, copies)
            digests.add(content_digest(read_raw_peft(folder, SPEC), "base"))
        if "rows" in features:
            folder = write_peft(tmp_path / "other", config | {"trainable_token_indices": {"lm_head": [7, 4]}}, tensors)
            digests.add(content_digest(read_raw_peft(folder, SPEC), "base"))
    assert len(digests) == (1 + 3) + (1 + 5 + 1) + (1 + 4)


def test_rounding_leaves_what_lies_beside_the_modules_alone(tmp_path: Path) -> None:
    config, tensors = peft_beyond(SPEC, features=("dora", "saved", "rows"))
    stored = read_raw_peft(write_peft(tmp_path / "it", config, tensors), SPEC)
    rounded, report = quantize_adapter(stored, "I8")
    path = tmp_path / f"a{CARD_SUFFIX}"
    write_card(path, ArrowCard("a", rounded, json.loads(rounded.metadata), report))
    card = read_card(path)
    assert (card.raw, card.quantization) == (rounded, report)
    assert rounded.parameters == stored.parameters
    assert rounded.token_rows == stored.token_rows
    for before, after in zip(stored.modules, rounded.modules, strict=True):
        assert after.magnitude == before.magnitude
        assert {after.a.dtype, after.b.dtype} == {"I8"}
    write_peft_folder(tmp_path / "again", rounded)
    served = [read_adapter(source, SPEC, supported_features=FEATURES) for source in (path, tmp_path / "again")]
    assert served[0].features == served[1].features >= {"DoRA", "trained norms", "trained token rows"}
