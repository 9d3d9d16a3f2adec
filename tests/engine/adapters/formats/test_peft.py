"""PEFT folders: what is read, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from peft.tuners.lora.config import CordaConfig, LoraGAConfig

from app.engine.adapters.adapter import BFLOAT16, LoraKey
from app.engine.adapters.bounded_files import ReadLimits
from app.engine.adapters.formats import patterns
from app.engine.adapters.formats import peft_config as peft_config_file
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.adapters.formats.reading import read_adapter
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterTooLarge
from app.engine.models.linear_modules import DENSE_TARGETS, target_shape
from tests import seeds
from tests.engine.adapters.random_adapters import (
    adapter_from_arrays,
    module_path,
    peft_config,
    peft_tensors,
    random_adapter,
    random_arrays,
    tiny_spec,
    write_peft,
)

SPEC = tiny_spec()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_target_is_read_with_its_scale_folded(tmp_path: Path, dtype: str) -> None:
    arrays = random_arrays(SPEC, 4)
    tensors = peft_tensors(arrays, dtype)
    adapter = read_adapter(write_peft(tmp_path, peft_config(4, lora_alpha=10), tensors), SPEC)
    assert set(adapter.weights) == {LoraKey(layer, target) for layer in range(2) for target in DENSE_TARGETS}
    for key, (a, b) in adapter.weights.items():
        prefix = f"base_model.model.{module_path(key.layer, key.target)}"
        np.testing.assert_array_equal(a, tensors[f"{prefix}.lora_A.weight"].astype(np.float32))
        np.testing.assert_array_equal(b, tensors[f"{prefix}.lora_B.weight"].astype(np.float32).T * np.float32(10 / 4))
        assert (a.shape[1], b.shape[1]) == target_shape(SPEC, key.layer, key.target)
        assert a.dtype == (BFLOAT16 if dtype == "BF16" else np.float32)
        assert b.dtype == np.float32, "the scale is no power of two"
        for array in (a, b):
            assert array.flags.c_contiguous
            assert array.flags.aligned
            assert not array.flags.writeable
    card = adapter.card
    assert (card.max_rank, card.targets, card.dtype, card.base_digest) == (
        4,
        tuple(sorted(DENSE_TARGETS)),
        dtype,
        "base",
    )
    assert card.size_bytes == sum(array.nbytes for pair in adapter.weights.values() for array in pair)


def test_ranks_and_alphas_follow_patterns_and_rslora(tmp_path: Path) -> None:
    arrays = random_arrays(SPEC, 4, ["q_proj", "down_proj"])
    arrays |= random_arrays(tiny_spec(1), 6, ["q_proj"])
    config = peft_config(
        4,
        ["q_proj", "down_proj"],
        lora_alpha=-3,
        use_rslora=True,
        rank_pattern={"^model.layers.0.self_attn.q_proj": 6, "q_proj": 4},
        alpha_pattern={r".*layers\.1\..*": 0.5, "down_proj": 0, "proj": 99},
    )
    adapter = read_adapter(write_peft(tmp_path, config, peft_tensors(arrays)), SPEC)
    scales = {
        (0, "q_proj"): -3 / math.sqrt(6),
        (1, "q_proj"): 0.5 / math.sqrt(4),
        (0, "down_proj"): 0.0,
        (1, "down_proj"): 0.5 / math.sqrt(4),
    }
    for (layer, target), scale in scales.items():
        expected = arrays[layer, target][1].T * np.float32(scale)
        np.testing.assert_array_equal(adapter.weights[LoraKey(layer, target)].b, expected)
    assert adapter.card.max_rank == 6


def test_a_fused_module_shares_a_and_splits_b(tmp_path: Path) -> None:
    rng = seeds.rng()
    a, b = rng.normal(size=(3, 24)).astype("f4"), rng.normal(size=(32 + 16 + 16, 3)).astype("f4")
    gate_a, gate_b = rng.normal(size=(3, 24)).astype("f4"), rng.normal(size=(80, 3)).astype("f4")
    tensors = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}"
        tensors[f"{prefix}.self_attn.qkv_proj.lora_A.weight"] = a
        tensors[f"{prefix}.self_attn.qkv_proj.lora_B.weight"] = b
        tensors[f"{prefix}.mlp.gate_up_proj.lora_A.weight"] = gate_a
        tensors[f"{prefix}.mlp.gate_up_proj.lora_B.weight"] = gate_b
    config = peft_config(3, ["qkv_proj", "gate_up_proj"], lora_alpha=6)
    adapter = read_adapter(write_peft(tmp_path, config, tensors), SPEC)
    for target, rows in {"q_proj": (0, 32), "k_proj": (32, 48), "v_proj": (48, 64)}.items():
        pair = adapter.weights[LoraKey(1, target)]
        np.testing.assert_array_equal(pair.a, a)
        np.testing.assert_array_equal(pair.b, 2 * b[slice(*rows)].T)
    np.testing.assert_array_equal(adapter.weights[LoraKey(0, "up_proj")].b, 2 * gate_b[40:].T)
    assert adapter.card.targets == ("gate_proj", "k_proj", "q_proj", "up_proj", "v_proj")


@pytest.mark.parametrize(
    ("modules", "present"),
    [
        (["q_proj"], {(0, "q_proj"), (1, "q_proj")}),
        (["model.layers.1.self_attn.q_proj"], {(1, "q_proj")}),
        (["self_attn.v_proj", "absent_in_this_model"], {(0, "v_proj"), (1, "v_proj")}),
        ("all-linear", {(layer, target) for layer in range(2) for target in DENSE_TARGETS}),
        (
            r".*\.layers\.[\d]{1,}\.(?:self_attn|attn)\.(?:k_proj|v_proj)",
            {(i, f"{t}_proj") for i in (0, 1) for t in "kv"},
        ),
        (r"model\.layers\.1\..*down_proj", {(1, "down_proj")}),
    ],
)
def test_target_modules_select_as_in_peft(tmp_path: Path, modules: Any, present: set[tuple[int, str]]) -> None:
    arrays = {key: pair for key, pair in random_arrays(SPEC, 2).items() if key in present}
    adapter = read_adapter(write_peft(tmp_path, peft_config(2, target_modules=modules), peft_tensors(arrays)), SPEC)
    assert {(key.layer, key.target) for key in adapter.weights} == present


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_to_transform": [1]},
        {"layers_to_transform": 1},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
        {"exclude_modules": [f"layers.0.{part}_proj" for part in ("self_attn.q", "mlp.up")]},
        {"exclude_modules": r"model\.layers\.0\..*"},
    ],
)
def test_layers_can_be_chosen_or_excluded(tmp_path: Path, changes: dict[str, object]) -> None:
    arrays = {key: pair for key, pair in random_arrays(SPEC, 2, ["q_proj", "up_proj"]).items() if key[0] == 1}
    config = peft_config(2, ["q_proj", "up_proj"], **changes)
    adapter = read_adapter(write_peft(tmp_path, config, peft_tensors(arrays)), SPEC)
    assert set(adapter.weights) == {LoraKey(1, "q_proj"), LoraKey(1, "up_proj")}


def test_digest_follows_contents_not_their_packaging(tmp_path: Path) -> None:
    arrays = random_arrays(SPEC, 2, ["q_proj", "o_proj"])
    tensors = peft_tensors(arrays)
    config = peft_config(2, ["q_proj", "o_proj"], lora_alpha=4)

    def digest(folder: str, config: dict[str, object], tensors: dict[str, Any], base: str = "base") -> str:
        return read_adapter(write_peft(tmp_path / folder, config, tensors), tiny_spec(digest=base)).card.digest

    original = digest("a", config, tensors)
    other_packaging = config | {"base_model_name_or_path": "elsewhere", "r": 2, "target_modules": "all-linear"}
    other_packaging["exclude_modules"] = ["k_proj", "v_proj", "mlp.gate_proj", "up_proj", "down_proj"]
    assert digest("b", other_packaging, dict(reversed(tensors.items()))) == original
    assert adapter_from_arrays(arrays, SPEC, alpha=4).card.digest == original

    name = next(iter(tensors))
    different = [
        digest("c", config | {"lora_alpha": 5}, tensors),
        digest("d", config | {"use_rslora": True}, tensors),
        digest("e", config, tensors | {name: tensors[name] + np.float32(1e-3)}),
        digest("f", config, tensors, base="another base"),
        digest("g", config, {key: value.astype(np.float16) for key, value in tensors.items()}),
    ]
    assert len({original, *different}) == 6
    assert len(original) == 64


def test_random_adapters_differ_unless_seeded() -> None:
    assert random_adapter(SPEC, 2, seed=1).card == random_adapter(SPEC, 2, seed=1).card
    assert random_adapter(SPEC, 2).card.digest != random_adapter(SPEC, 2).card.digest


_Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _edit_tensors(edit: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def edited(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: tensor.copy() for name, tensor in tensors.items()}
        edit(tensors)
        return tensors

    return edited


def _poison(value: float) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors[f"{_Q}.lora_B.weight"].__setitem__((5, 1), value)


@pytest.mark.parametrize(
    ("edit", "error", "names"),
    [
        (lambda t: t.pop(f"{_Q}.lora_B.weight"), AdapterFormatError, ["0.self_attn.q_proj", "lora_B"]),
        (lambda t: t.pop(f"{_Q}.lora_A.weight"), AdapterFormatError, ["0.self_attn.q_proj", "lora_A"]),
        (
            lambda t: [t.pop(f"{_Q}.lora_{h}.weight") for h in "AB"],
            AdapterFormatError,
            ["0.self_attn.q_proj", "no tensors"],
        ),
        (lambda t: t.update({f"{_Q}.lora_E.weight": np.zeros(3, "f4")}), AdapterFormatError, ["lora_E"]),
        (lambda t: t.update({"stray": np.zeros(3, "f4")}), AdapterFormatError, ["stray"]),
        (lambda t: t.update({f"{_Q}.lora_magnitude_vector": np.zeros(32, "f4")}), AdapterFormatError, ["magnitude"]),
        (lambda t: t.update({f"{_Q}.lora_A.weight": np.zeros((2, 25), "f4")}), AdapterMismatch, ["q_proj", "25", "24"]),
        (lambda t: t.update({f"{_Q}.lora_B.weight": np.zeros((31, 2), "f4")}), AdapterMismatch, ["q_proj", "31", "32"]),
        (
            lambda t: t.update({f"{_Q}.lora_A.weight": np.zeros((3, 24), "f4")}),
            AdapterFormatError,
            ["q_proj", "rank 2"],
        ),
        (lambda t: t.update({f"{_Q}.lora_A.weight": np.zeros((24,), "f4")}), AdapterFormatError, ["q_proj", "[24]"]),
        (
            lambda t: t.update({f"{_Q}.lora_A.weight": np.zeros((0, 24), "f4")}),
            AdapterFormatError,
            ["q_proj", "[0, 24]"],
        ),
        (lambda t: t.update({f"{_Q}.lora_A.weight": np.zeros((2, 24), "i4")}), AdapterFormatError, ["q_proj", "I32"]),
        (lambda t: t.update({f"{_Q}.lora_A.weight": np.zeros((2, 24), "i8")}), AdapterFormatError, ["q_proj", "I64"]),
        (_poison(np.nan), AdapterFormatError, ["q_proj", "lora_B[5, 1]", "nan"]),
        (_poison(-np.inf), AdapterFormatError, ["q_proj", "lora_B[5, 1]", "inf"]),
        (_poison(3e38), AdapterFormatError, ["q_proj", "float32"]),
        (
            lambda t: t.update({n.replace("layers.0", "layers.7"): v for n, v in list(t.items())}),
            AdapterMismatch,
            ["model.layers.7.self_attn.q_proj", "2 layers"],
        ),
        (
            lambda t: t.update({n.replace("q_proj", "k_proj"): v[:16] for n, v in list(t.items())}),
            AdapterFormatError,
            ["k_proj", "target_modules"],
        ),
        (lambda t: t.clear(), AdapterFormatError, ["no tensors"]),
    ],
)
def test_a_tensor_that_is_wrong_is_named(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], error: type[Exception], names: list[str]
) -> None:
    tensors = _edit_tensors(edit)(peft_tensors(random_arrays(SPEC, 2, ["q_proj"])))
    with pytest.raises(error) as caught:
        read_adapter(write_peft(tmp_path, peft_config(2, ["q_proj"], lora_alpha=100), tensors), SPEC)
    assert type(caught.value) is error
    for name in names:
        assert name in str(caught.value)


REFUSED_VALUES = {
    "arrow_config": {"top_k": 3},
    "init_lora_weights": "pissa",
    "enable_lora": [True, False],
    "kasa_config": {"beta": 1},
    "layer_replication": [[0, 1]],
    "loftq_config": {"loftq_bits": 4},
    "megatron_config": {"tensor_model_parallel_size": 1},
    "merge_weights": True,
    "task_type": "TOKEN_CLS",
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
}


def test_every_option_that_is_not_served_has_a_case() -> None:
    from app.engine.adapters.formats.peft_config import OFF_VALUES

    assert set(REFUSED_VALUES) == set(OFF_VALUES)


@pytest.mark.parametrize("name", ["corda", "lora_ga"])
def test_a_converted_initialization_may_leave_its_settings_behind(tmp_path: Path, name: str) -> None:
    """PEFT sets `init_lora_weights` back when it converts, and nothing else; then the settings mean nothing to it."""
    left = {f"{name}_config": dataclasses.asdict({"corda": CordaConfig, "lora_ga": LoraGAConfig}[name]())}
    tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))
    plain = read_adapter(write_peft(tmp_path / "plain", peft_config(2, ["q_proj"]), tensors), SPEC)
    config = peft_config(2, ["q_proj"], init_lora_weights=True, **left)
    assert read_adapter(write_peft(tmp_path / "converted", config, tensors), SPEC).card.digest == plain.card.digest
    config = peft_config(2, ["q_proj"], init_lora_weights=name, **left)
    with pytest.raises(AdapterFormatError, match="init_lora_weights"):
        read_adapter(write_peft(tmp_path / "other", config, tensors), SPEC)


def test_every_field_of_peft_is_decided() -> None:
    """A field of a later PEFT fails here until it is used, known to be harmless, or refused."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    decided = [peft_config_file.USED_KEYS, peft_config_file.INERT_KEYS, frozenset(peft_config_file.OFF_VALUES)]
    assert fields <= frozenset().union(*decided)
    assert sum(map(len, decided)) == len(frozenset().union(*decided)), "a key is decided once"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *REFUSED_VALUES.items(),
        ("alora_invocation_tokens", []),
        ("alora_invocation_tokens", [-1]),
        ("alora_invocation_tokens", "call"),
        ("alora_invocation_tokens", [True]),
        ("bias", None),
        ("bias", "some"),
        ("lora_bias", True),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", ["(lm_head"]),
        ("trainable_token_indices", [0, 1]),
        ("trainable_token_indices", [1, 1]),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", {"q_proj": [1]}),
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("some_new_option", False),
        ("r", 0),
        ("r", -1),
        ("r", 2.0),
        ("r", True),
        ("lora_alpha", None),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("lora_alpha", 10**400),
        ("use_rslora", 1),
        ("use_dora", 0),
        ("fan_in_fan_out", "yes"),
        ("target_modules", None),
        ("target_modules", [1]),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", "(q_proj"),
        ("target_modules", "q_proj)|(k_proj"),
        ("target_modules", r"\Q.*q_proj"),
        ("target_modules", "(?L)q_proj"),
        ("target_modules", "(" * 1000 + "q_proj" + ")" * 1000),
        ("target_modules", "q_proj{99999999999999999999}"),
        ("rank_pattern", {"(?i)q_proj": 3}),
        ("ensure_weight_tying", "yes"),
        ("target_modules", "\ud800"),
        ("target_modules", ".*" * 4000),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", ["q_proj", "embed_tokens"]),
        ("rank_pattern", [1]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": 3}),
        ("rank_pattern", {"(": 3}),
        ("alpha_pattern", {"q_proj": "x"}),
        ("layers_to_transform", [-1]),
        ("layers_to_transform", [0.5]),
        ("layers_pattern", "layers"),
        ("exclude_modules", 7),
    ],
)
def test_a_setting_that_is_wrong_or_not_served_is_named(tmp_path: Path, key: str, value: object) -> None:
    config = peft_config(2, ["q_proj"], **{key: value})
    with pytest.raises(AdapterFormatError) as caught:
        read_adapter(write_peft(tmp_path, config, peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))), SPEC)
    assert type(caught.value) is AdapterFormatError
    assert key in str(caught.value)
    assert len(str(caught.value)) < 1000


SLOW = r"((.*)*)*((a|.|..)+)+self_attn\.q_proj(x?){20}y"
SLOW_SETTINGS = {
    "target_modules": SLOW,
    "exclude_modules": SLOW,
    "rank_pattern": {"nothing": 2, SLOW: 3},
    "layers_pattern": [SLOW],
}


@pytest.mark.parametrize("key", SLOW_SETTINGS)
def test_a_pattern_cannot_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.05)
    config = peft_config(2, ["q_proj"], layers_to_transform=[0, 1], **{key: SLOW_SETTINGS[key]})
    if key == "target_modules":
        del config["layers_to_transform"]
    handler = signal.getsignal(signal.SIGPROF)
    start_s = time.process_time()
    with pytest.raises(AdapterFormatError, match=rf"{key}: pattern .* takes longer than 0.05 s of processor time"):
        read_adapter(write_peft(tmp_path, config, peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))), SPEC)
    assert time.process_time() - start_s < 5
    assert signal.getsignal(signal.SIGPROF) is handler
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


def test_patterns_run_in_a_process_of_their_own_outside_the_main_thread(tmp_path: Path) -> None:
    tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))
    good = write_peft(tmp_path / "good", peft_config(2, target_modules=r".*(?=q_proj)\w+"), tensors)
    wrong = write_peft(tmp_path / "wrong", peft_config(2, target_modules="(q_proj"), tensors)
    slow = write_peft(tmp_path / "slow", peft_config(2, target_modules=SLOW), tensors)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(read_adapter, good, SPEC).result().card.targets == ("q_proj",)
        for folder, message in ((wrong, r"pattern '\(q_proj' is not understood"), (slow, "takes longer than 1 s")):
            with pytest.raises(AdapterFormatError, match=message):
                thread.submit(read_adapter, folder, SPEC).result()


def test_an_adapter_for_another_model_matches_nothing(tmp_path: Path) -> None:
    with pytest.raises(AdapterMismatch, match="c_attn"):
        read_adapter(write_peft(tmp_path, peft_config(2, ["c_attn"]), {}), SPEC)


def test_a_module_saved_fused_and_split_is_refused(tmp_path: Path) -> None:
    tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.qkv_proj"
        tensors[f"{prefix}.lora_A.weight"] = np.ones((2, 24), "f4")
        tensors[f"{prefix}.lora_B.weight"] = np.ones((64, 2), "f4")
    with pytest.raises(AdapterFormatError, match="q_proj"):
        read_adapter(write_peft(tmp_path, peft_config(2, ["q_proj", "qkv_proj"]), tensors), SPEC)


def _raw_config(text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_config.json").write_bytes(text)


def _raw_weights(contents: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_model.safetensors").write_bytes(contents)


def _with_header(header: object, data: bytes = b"") -> Callable[[Path], object]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return _raw_weights(struct.pack("<Q", len(text)) + text + data)


def _tensor(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _to_pipe(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "pickle"),
        (_to_pipe, "not a regular file"),
        (_raw_config(b"[]"), "not an object"),
        (_raw_config(b"{"), "not valid JSON"),
        (_raw_config(b"\xff"), "not valid JSON"),
        (_raw_config(b'{"peft_type": "LORA", "r": 2, "r": 3}'), "'r' appears twice"),
        (_raw_config(b'{"rank_pattern": {"a": 2, "a": 3}}'), "'a' appears twice"),
        (_raw_config(b'{"lora_alpha": NaN}'), "NaN"),
        (_raw_config(b'{"lora_alpha": ' + b"1" * 5000 + b"}"), "not valid JSON"),
        (_raw_config(b'{"a":' * 100_000), "nested too deeply"),
        (_raw_config(b'{"x": "' + b"x" * (1 << 20) + b'"}'), "at most 1048576"),
        (_raw_weights(b""), "0 bytes"),
        (_raw_weights(b"\x00" * 7), "7 bytes"),
        (_raw_weights(struct.pack("<Q", 100) + b"{}"), "100 bytes in a file of 10"),
        (_raw_weights(struct.pack("<Q", 1 << 62) + b"{}"), "at most"),
        (_with_header(b"[]"), "not an object"),
        (_with_header(b'{"a": 1, "a": 2}'), "appears twice"),
        (_with_header({"a": 1}), "exactly dtype"),
        (_with_header({"a": _tensor(0, 4, [1]) | {"more": 1}}, b"\0" * 4), "exactly dtype"),
        (_with_header({"a": _tensor(0, 4, [1], "Q9")}, b"\0" * 4), "Q9"),
        (_with_header({"a": _tensor(0, 4, [-1])}, b"\0" * 4), "[-1]"),
        (_with_header({"a": _tensor(0, 4, [True])}, b"\0" * 4), "[True]"),
        (_with_header({"a": _tensor(0, 4, [1] * 5)}, b"\0" * 4), "up to 4"),
        (_with_header({"a": _tensor(0, 4, [1 << 62, 1 << 62])}, b"\0" * 4), "do not hold"),
        (_with_header({"a": _tensor(0, 8, [2])}, b"\0" * 4), "leave the file's 4 data bytes; the file is cut off"),
        (_with_header({"a": _tensor(4, 0, [1])}, b"\0" * 4), "leave the file"),
        (_with_header({"a": _tensor(0, 4, [1]), "b": _tensor(0, 4, [1])}, b"\0" * 4), "overlaps"),
        (_with_header({"a": _tensor(0, 8, [2]), "b": _tensor(4, 12, [2])}, b"\0" * 12), "overlaps"),
        (_with_header({"a": _tensor(0, 4, [1]), "b": _tensor(8, 12, [1])}, b"\0" * 12), "unused"),
        (_with_header({"a": _tensor(0, 4, [1])}, b"\0" * 5), "belong to none"),
        (_with_header({"__metadata__": {"a": 1}}), "__metadata__"),
        (_with_header({"x" * 600: _tensor(0, 4, [1])}, b"\0" * 4), "longer than"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    folder = write_peft(
        tmp_path / "adapter", peft_config(2, ["q_proj"]), peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))
    )
    assert read_adapter(folder, SPEC).card.max_rank == 2
    damage(folder)
    with pytest.raises((AdapterFormatError, AdapterTooLarge)) as caught:
        read_adapter(folder, SPEC)
    assert says in str(caught.value)


def test_limits_are_kept(tmp_path: Path) -> None:
    tensors = peft_tensors(random_arrays(SPEC, 5, ["q_proj"]))
    folder = write_peft(tmp_path, peft_config(5, ["q_proj"]), tensors)
    limits = ReadLimits()
    for tight, says in [
        (replace(limits, max_rank=4), "4"),
        (replace(limits, max_tensors=3), "4 tensors; at most 3"),
        (replace(limits, max_header_bytes=100), "at most 100"),
        (replace(limits, max_weight_bytes=1000), "at most 1000"),
    ]:
        with pytest.raises(AdapterTooLarge, match=says):
            read_adapter(folder, SPEC, tight)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    for place in (tmp_path / "nothing", Path(os.devnull)):
        with pytest.raises(AdapterFormatError, match="not a folder"):
            read_raw_peft(place, SPEC)
