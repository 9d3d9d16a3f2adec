"""Hostile adapters through the store: each is refused with a typed error, and the next request is served."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from app.engine.adapters.adapter_tokenizer import TEXT_FILES
from app.engine.adapters.formats.arrow import CARD_SUFFIX
from app.engine.errors import (
    AdapterError,
    AdapterFormatError,
    AdapterReadFailed,
    AdapterTooLarge,
    NotFound,
    PolyloraError,
    UnsafeSource,
)
from tests.deployments.store.sources.conftest import SPEC, Store
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, write_peft

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_%s.weight"


A, B = NAME % "A", NAME % "B"
ZEROS = bytes(228)


def header(entries: object, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, *shape: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}


def weights_with(value: float) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))
        next(iter(tensors.values()))[0, 1] = value
        write_peft(folder, peft_config(2, ["q_proj"]), tensors)

    return attack


def weights(contents: bytes) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(contents)

    return attack


def config(contents: bytes) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / CONFIG).write_bytes(contents)

    return attack


def sparse(name: str, size: int) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return attack


def million_tensors(folder: Path) -> None:
    tensors = b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(10**6))
    (folder / WEIGHTS).write_bytes(header(b"{" + tensors + b"}"))


def rank_of_100_000(folder: Path) -> None:
    tensors = {A: np.zeros((10**5, 24), "f4"), B: np.zeros((32, 10**5), "f4")}
    write_peft(folder, peft_config(10**5, ["q_proj"], layers_to_transform=0), tensors)


def only_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def device(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/dev/zero")


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def archive(kind: str) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        buffer = io.BytesIO()
        if kind == "zip":
            with zipfile.ZipFile(buffer, "w") as file:
                file.writestr("../../escaped", "x")
                file.write(folder / WEIGHTS, WEIGHTS)
        else:
            with tarfile.open(fileobj=buffer, mode="w:gz") as file:
                file.add(folder / WEIGHTS, "../../escaped")
        (folder / WEIGHTS).write_bytes(buffer.getvalue())

    return attack


ATTACKS: dict[str, Callable[[Path], None]] = {
    "header longer than memory": weights(struct.pack("<Q", 2**63) + b"{}"),
    "header longer than the file": weights(struct.pack("<Q", 2**20) + b"{}"),
    "header of nested lists": weights(header(b"[" * 10**6)),
    "header with a key twice": weights(header(b'{"a":{},"a":{}}')),
    "a million tensors": million_tensors,
    "rank 100,000": rank_of_100_000,
    "shape that overflows": weights(header({A: entry(0, 0, 2**62, 2**62, 4)})),
    "overlapping offsets": weights(header({A: entry(0, 96, 1, 24), B: entry(48, 176, 32, 1)}, ZEROS[52:])),
    "gap between tensors": weights(header({A: entry(0, 96, 1, 24), B: entry(100, 228, 32, 1)}, ZEROS)),
    "offsets beyond the file": weights(header({A: entry(0, 96, 1, 24)})),
    "negative offsets": weights(header({A: entry(-96, 0, 1, 24)})),
    "NaN": weights_with(float("nan")),
    "infinity": weights_with(float("-inf")),
    "configuration of 100 MB": sparse(CONFIG, 100 << 20),
    "weights of a terabyte": sparse(WEIGHTS, 1 << 40),
    "configuration that is a list": config(b"[]"),
    "configuration with NaN": config(b'{"r": NaN}'),
    "pattern that explodes": config(json.dumps(peft_config(2, []) | {"target_modules": "(a+)+$" * 50}).encode()),
    "only pickle": only_pickle,
    "zip": archive("zip"),
    "tar": archive("tar"),
    "pipe": pipe,
    "device": device,
    "empty": empty,
}  # fmt: skip


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_is_refused_and_the_store_goes_on(store: Store, tmp_path: Path, attack: str) -> None:
    folder = tmp_path / "attack"
    write_peft(folder, peft_config(2, ["q_proj"]), peft_tensors(random_arrays(SPEC, 2, ["q_proj"])))
    await store.register("before", "attack")
    ATTACKS[attack](folder)
    with pytest.raises((AdapterError, UnsafeSource)) as caught:
        await store.register("attack", "attack")
    assert not isinstance(caught.value, AdapterReadFailed), "a reader refused it; no limit had to end the process"
    assert len(str(caught.value)) < 2000
    assert [entry.ref.name for entry in store.entries()] == ["before"]
    good = (await store.register("good", "original")).ref
    store.invalidate(good.digest)
    await store.fetch(good)
    assert not (tmp_path.parent / "escaped").exists()


@pytest.mark.parametrize("name", ["attack.zip", "attack.tar.gz", "attack.bin", "attack.pt", f"attack{CARD_SUFFIX}"])
async def test_files_that_are_no_cards(store: Store, files: dict[str, bytes], tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as file:
        for inner, contents in files.items():
            file.writestr(inner, contents)
    with pytest.raises(AdapterFormatError):
        await store.register("attack", name)


@pytest.mark.usefixtures("files")
async def test_paths_that_lead_outside(store: Store, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    write_peft(outside, peft_config(2, ["q_proj"]), peft_tensors(random_arrays(SPEC, 2, ["q_proj"])))
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    sources = [
        str(outside),
        f"../{outside.name}",
        f"original/../../{outside.name}",
        "link",
        "loop",
        "/etc",
        "/",
        "",
        "a\0",
    ]
    for source in [*sources, "file:///etc", f"file://{outside}", "x" * 5000]:
        with pytest.raises(UnsafeSource):
            await store.register("attack", source)
    with pytest.raises(NotFound):
        await store.register("attack", "none")
    for name in ("../x", "a//b", "base:../..", "", "x\n", "é"):
        with pytest.raises(PolyloraError):
            await store.register(name, "original")
    assert store.entries() == []


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, *TEXT_FILES])
async def test_a_linked_file_of_a_local_folder_is_refused_by_name(store: Store, tmp_path: Path, name: str) -> None:
    """A link would show any file that the service's user can read, as a chat template for example."""
    linked = tmp_path / "original" / name
    target = tmp_path / "elsewhere"
    if linked.exists():
        linked.rename(target)
    else:
        target.write_text('{"secret": "of the service"}')
    linked.symlink_to(target)
    with pytest.raises(AdapterFormatError, match=f"'{name}' is a symbolic link"):
        await store.register("attack", "original")
    linked.unlink()
    linked.symlink_to("nowhere")
    with pytest.raises(AdapterFormatError, match=f"'{name}' is a symbolic link"):
        await store.register("attack", "original")


async def test_a_linked_card_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / f"real{CARD_SUFFIX}").write_bytes(b"card")
    (tmp_path / f"link{CARD_SUFFIX}").symlink_to(f"real{CARD_SUFFIX}")
    with pytest.raises(UnsafeSource, match="symbolic link"):
        await store.register("attack", f"link{CARD_SUFFIX}")


async def test_weights_above_a_limit_name_it(tmp_path: Path, store: Store) -> None:
    write_peft(tmp_path / "wide", peft_config(64, ["q_proj"]), peft_tensors(random_arrays(SPEC, 64, ["q_proj"])))
    store._cache.max_bytes = 1000
    with pytest.raises(AdapterTooLarge, match="host_cache_bytes"):
        await store.register("wide", "wide")
