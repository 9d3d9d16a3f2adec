"""Validation happens elsewhere: bombs, hangs and crashes end a child, not us."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from app.engine.adapters import validate
from app.engine.adapters.arrow import CARD_SUFFIX, ArrowCard, write_card
from app.engine.adapters.limits import ReadLimits
from app.engine.adapters.peft import read_peft, read_peft_stored
from app.engine.adapters.validate import ChildLimits, Validator, files_digest, validate_in_child
from app.engine.errors import AdapterError, AdapterFormatError, AdapterMismatch, AdapterTooLarge
from tests.engine.adapters.making import peft_config, peft_tensors, random_arrays, tiny_spec, write_peft

SPEC = tiny_spec()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_peft(
        tmp_path / "adapter", peft_config(2, ["q_proj"]), peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))
    )


def test_a_good_adapter_gives_its_card(folder: Path) -> None:
    assert validate_in_child(folder, SPEC) == read_peft(folder, SPEC).card
    card = folder.parent / f"adapter{CARD_SUFFIX}"
    write_card(card, ArrowCard("a", read_peft_stored(folder, SPEC), {}))
    assert validate_in_child(card, SPEC) == read_peft(folder, SPEC).card


def test_the_childs_error_is_ours(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, error, says in [
        ({"r": 0}, AdapterFormatError, "'r' is 0"),
        ({"target_modules": ["c_attn"]}, AdapterFormatError, "PEFT would drop it"),
    ]:
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(error, match=says):
            validate_in_child(folder, SPEC)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterMismatch, match=r"1 layers"):
        validate_in_child(folder, tiny_spec(1))


def _header_bomb(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")


def _million_tensors(folder: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(entry % index for index in range(10**6)) + "}").encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def _high_rank(folder: Path) -> None:
    write_peft(folder, peft_config(10**5, ["q_proj"]), {"a": np.zeros(1, "f4")})


def _huge_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b'{"a": "' + b"x" * 100_000_000 + b'"}')


def _endless(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/dev/zero")


def _sparse_terabyte(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    "attack", [_header_bomb, _million_tensors, _high_rank, _huge_config, _endless, _sparse_terabyte]
)
def test_attacks_are_refused_quickly(folder: Path, attack: Callable[[Path], None]) -> None:
    attack(folder)
    start = time.monotonic()
    with pytest.raises((AdapterFormatError, AdapterTooLarge)):
        validate_in_child(folder, SPEC)
    assert time.monotonic() - start < 20


def test_memory_is_bounded(folder: Path) -> None:
    """A zero-filled, sparse file of valid shape: 672 MB to read, and twice that again in float32."""
    rows = 3_000_000
    header = {}
    for index, (half, shape) in enumerate({"A": [rows, 24], "B": [32, rows]}.items()):
        start = 0 if index == 0 else 4 * rows * 24
        offsets = [start, start + 4 * shape[0] * shape[1]]
        name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight"
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 * rows * 56)
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(rows, ["q_proj"], layers_to_transform=0)))
    limits = ReadLimits(max_rank=rows)
    with pytest.raises(AdapterTooLarge, match="memory"):
        validate_in_child(folder, SPEC, limits, ChildLimits(base_memory_bytes=800 << 20, memory_per_byte=0))


def test_time_is_bounded(folder: Path) -> None:
    with pytest.raises(AdapterTooLarge, match="stopped"):
        validate_in_child(folder, SPEC, child=ChildLimits(base_s=0.01))


def test_a_child_that_dies_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate.sys, "executable", "/bin/false")
    with pytest.raises(AdapterFormatError, match="exit status 1"):
        validate_in_child(folder, SPEC)


def test_the_child_does_not_load_torch() -> None:
    code = "import app.engine.adapters.validate, sys; print(sorted({'torch', 'ray', 'jax'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_a_verdict_is_reached_once_per_contents(folder: Path) -> None:
    validator = Validator()
    cards = []
    threads = [threading.Thread(target=lambda: cards.append(validator.validate(folder, SPEC))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert validator.num_children == 1
    assert cards == [cards[0]] * 8

    good = (folder / "adapter_config.json").read_bytes()
    (folder / "adapter_config.json").write_bytes(good.replace(b'"r": 2', b'"r": 3'))
    messages = set()
    for _ in range(3):
        with pytest.raises(AdapterFormatError) as caught:
            validator.validate(folder, SPEC)
        messages.add(str(caught.value))
    assert validator.num_children == 2
    assert len(messages) == 1
    (folder / "adapter_config.json").write_bytes(good)
    assert validator.validate(folder, SPEC) == cards[0]
    assert validator.num_children == 2
    with pytest.raises(AdapterError):
        validator.validate(folder, tiny_spec(1, digest="another"))
    assert validator.num_children == 3


def test_verdicts_are_bounded(folder: Path) -> None:
    validator = Validator(max_verdicts=1)
    for base in ("one", "two", "one"):
        validator.validate(folder, tiny_spec(digest=base))
    assert validator.num_children == 3
    assert len(validator._verdicts) == len(validator._locks) == 1


def test_files_digest_sees_every_byte(folder: Path) -> None:
    digests = {files_digest(folder, SPEC), files_digest(folder, tiny_spec(digest="other"))}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        contents = (folder / name).read_bytes()
        (folder / name).write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
        digests.add(files_digest(folder, SPEC))
        (folder / name).write_bytes(contents)
    assert len(digests) == 4
    assert files_digest(folder, SPEC) in digests
