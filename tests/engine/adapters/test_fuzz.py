"""Over twenty thousand damaged files: every one is read correctly or refused with a typed error.

Fresh mutations every run, from the run's seed. Three kinds: bytes changed
anywhere, values changed inside the JSON of a safetensors header, and values changed in the
configuration. Arrow cards are read with the checksum checked and with it forged, so that damage
gets past it.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.bounded_files import ReadLimits
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats import arrow
from app.engine.adapters.formats.arrow import CARD_SUFFIX, ArrowCard, write_card
from app.engine.adapters.formats.convert import quantize_adapter
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.adapters.formats.reading import read_adapter
from app.engine.errors import AdapterError
from app.engine.models.linear_modules import target_shape
from tests.budgets import examples
from tests.engine.adapters.random_adapters import (
    peft_beyond,
    peft_config,
    peft_tensors,
    random_arrays,
    tiny_spec,
    write_peft,
)
from tests.seeds import any_seed

SPEC = tiny_spec(1)
LIMITS = ReadLimits(max_weight_bytes=1 << 20, max_config_bytes=1 << 16, max_header_bytes=1 << 16, max_tensors=64)
FILES_PER_KIND = examples(3500)
FILES_PER_CARD = examples(1500)

_WORDS: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 1.5, -0.0, 1e308, 2**31, 2**63 - 1, 2**63, 2**64, 10**30),
    *(
        "",
        "q_proj",
        "LORA",
        "F32",
        "BF16",
        "F64",
        "lora_only",
        "(",
        "[",
        "\\",
        ".*",
        "a{1000}",
        "\ud800",
        "\0",
        "é" * 50,
    ),
    *([], {}, [0], [0, 0], [[]], {"a": 1}, ["q_proj"], [[1]], {"": None}),
]


def _mutate_bytes(contents: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(contents)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        place = rng.randrange(len(mutated) + 1)
        match rng.randrange(6):
            case 0:
                mutated[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del mutated[place : place + rng.choice([1, 2, 8, 64, 10**6])]
            case 2:
                mutated[place:place] = rng.randbytes(rng.choice([1, 4, 8, 64]))
            case 3:
                value = rng.choice([0, 1, 0x7F, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
                mutated[place : place + 8] = struct.pack("<Q", value)
            case 4:
                other = rng.randrange(len(mutated) + 1)
                mutated[place : place + 16] = mutated[other : other + 16]
            case _:
                if mutated:
                    mutated[rng.randrange(min(len(mutated), 600))] ^= 1 << rng.randrange(8)  # where headers are
    return bytes(mutated)


def _mutate_json(value: Any, rng: random.Random) -> Any:
    """A copy with one to three places replaced, removed, doubled or nested."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.randrange(1, 4)):
        parent: Any = root
        while True:
            keys = list(parent) if isinstance(parent, dict) else range(len(parent))
            if not keys:
                break
            key = rng.choice(keys)
            child = parent[key]
            if isinstance(child, (dict, list)) and child and rng.random() < 0.8:
                parent = child
                continue
            match rng.randrange(6):
                case 0:
                    del parent[key]
                case 1 if isinstance(parent, dict):
                    parent[rng.choice([f"{key}x", "new", "", "a.b", "base_model.model.x.lora_A.weight"])] = child
                case 2:
                    parent[key] = [child] * rng.choice([1, 2, 1 if isinstance(child, (dict, list)) else 1000])
                case 3 if type(child) is int:
                    parent[key] = child + rng.choice([-1, 1, 4, 2**32])
                case _:
                    parent[key] = copy.deepcopy(rng.choice(_WORDS))
            break
        if not root:
            return None
    return root[0]


def _json_text(value: Any, rng: random.Random) -> bytes:
    text = json.dumps(value)
    if rng.random() < 0.05:
        text = text.replace(":", rng.choice([":NaN,", ":-Infinity,", ": [" * 3000, ":1e999,"]), 1)
    if rng.random() < 0.05:
        text = text[:-1] + "," + text[1:]  # every key twice
    return text.encode("utf-8", "surrogatepass")


@pytest.fixture
def rng() -> random.Random:
    return random.Random(any_seed())


@pytest.fixture(params=["plain"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An adapter in memory where the system has a place for that: a disk makes these tests ten times slower."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    arrays = random_arrays(SPEC, 2, ["q_proj", "down_proj"])
    config = peft_config(2, ["q_proj", "down_proj"], rank_pattern={"q_proj": 2}, alpha_pattern={".*down_proj": 3})
    tensors = peft_tensors(arrays, "BF16")
    if request.param == "beyond":
        config, tensors = peft_beyond(SPEC, 2, "BF16", ("dora", "saved", "rows"))
    yield write_peft(place / "adapter", config, tensors)
    shutil.rmtree(place)


def _count_outcomes(
    path: Path, num_files: int, damage: Callable[[], None], only_digest: str | None = None
) -> dict[str, int]:
    """How often each typed error, or "read", came out. Any other exception fails the test by itself.

    With `only_digest`, what is read must be that adapter: damage that matters cannot go unnoticed.
    """
    outcomes: dict[str, int] = {}
    for _ in range(num_files):
        damage()
        try:
            adapter = read_adapter(path, SPEC, LIMITS, FEATURES)
        except AdapterError as error:
            outcome = type(error).__name__ if 10 < len(str(error)) < 2000 else f"useless message: {error}"
        else:
            outcome = "read"
            _check_invariants(adapter)
            assert only_digest in (None, adapter.card.digest)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert set(outcomes) <= {"read", "AdapterFormatError", "AdapterMismatch", "AdapterTooLarge"}
    return outcomes


def _check_invariants(adapter: LoraAdapter) -> None:
    assert adapter.weights
    for key, (a, b) in adapter.weights.items():
        assert (a.shape[1], b.shape[1]) == target_shape(SPEC, key.layer, key.target)
        assert a.shape[0] == b.shape[0] >= 1
        assert np.isfinite(a).all()
        assert np.isfinite(b).all()


def test_bytes_changed_anywhere_in_a_folder(folder: Path, rng: random.Random) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    originals = {path: path.read_bytes() for path in (weights, config)}

    def damage() -> None:
        for path, contents in originals.items():
            path.write_bytes(contents)
        path = rng.choice([weights, weights, weights, config])
        path.write_bytes(_mutate_bytes(originals[path], rng))

    outcomes = _count_outcomes(folder, FILES_PER_KIND, damage)
    assert outcomes["AdapterFormatError"] > FILES_PER_KIND / 2
    assert outcomes["read"] > 10


@pytest.mark.parametrize("folder", ["plain", "beyond"], indirect=True)
def test_values_changed_in_a_safetensors_header(folder: Path, rng: random.Random) -> None:
    weights = folder / "adapter_model.safetensors"
    contents = weights.read_bytes()
    (size,) = struct.unpack("<Q", contents[:8])
    header = json.loads(contents[8 : 8 + size])

    def damage() -> None:
        text = _json_text(_mutate_json(header, rng), rng)
        weights.write_bytes(struct.pack("<Q", len(text)) + text + contents[8 + size :])

    outcomes = _count_outcomes(folder, FILES_PER_KIND, damage)
    assert outcomes["AdapterFormatError"] > FILES_PER_KIND / 2


@pytest.mark.parametrize("folder", ["plain", "beyond"], indirect=True)
def test_values_changed_in_a_configuration(folder: Path, rng: random.Random) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_bytes())
    outcomes = _count_outcomes(
        folder, FILES_PER_KIND, lambda: path.write_bytes(_json_text(_mutate_json(config, rng), rng)) and None
    )
    assert outcomes["AdapterFormatError"] > FILES_PER_KIND / 2
    assert outcomes["read"] > 10


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("checksum", ["checked", "forged"])
def test_bytes_changed_anywhere_in_a_card(
    folder: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, quantised: bool, checksum: str
) -> None:
    stored, report = read_raw_peft(folder, SPEC), None
    if quantised:
        stored, report = quantize_adapter(stored, "I4")
    if checksum == "forged":
        monkeypatch.setattr(arrow, "_checksum", lambda *_: "0" * 64)
    path = folder.parent / f"card{CARD_SUFFIX}"
    write_card(path, ArrowCard("card", stored, {"author": "me"}, report))
    original = path.read_bytes()

    def damage() -> None:
        path.unlink()  # never rewrite a file that may still be mapped
        path.write_bytes(_mutate_bytes(original, rng))

    digest = read_adapter(path, SPEC).card.digest if checksum == "checked" else None
    outcomes = _count_outcomes(path, FILES_PER_CARD, damage, digest)
    assert outcomes["AdapterFormatError"] > FILES_PER_CARD / 2
    assert outcomes["read"] > 10
