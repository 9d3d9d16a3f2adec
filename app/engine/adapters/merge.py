"""Merges an adapter into its base, as PEFT's `merge_and_unload` does.

The result is a folder that transformers and this service load as a base model, or tensors for an engine that serves
only this adapter. Sums are float32; a folder rounds them to each tensor's stored dtype, and those of a GGUF base stay
float32. What cannot be merged is refused by name before anything is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from app.engine.adapters.adapter import LoraAdapter, LoraKey, to_float32
from app.engine.adapters.features import MERGEABLE_FEATURES
from app.engine.adapters.modules import Module, layer_modules
from app.engine.errors import AdapterMismatch
from app.engine.models.checkpoint import Checkpoint
from app.engine.models.gguf.gguf_export import folder_files, folder_tensors
from app.engine.models.hf.safetensors_folder import read_tensors, stored_tensors
from app.engine.models.moe_weight_layouts import canonical_module
from app.engine.models.weight_names import expected_tensors
from app.kernels.dora.reference import dora_scale


def merge(checkpoint: Checkpoint, adapter: LoraAdapter, target: Path) -> int:
    """Write the merged base into `target`, a new or empty folder; returns the number of merged modules.

    Raises AdapterMismatch for what cannot be merged, CheckpointError for a GGUF base that no folder can represent.
    """
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise AdapterMismatch(f"'{target}' exists and is not an empty folder; name a new one")
    folder = checkpoint.tokenizer_source
    if folder.is_file():
        _merge_gguf(checkpoint, adapter, target)
        return len(adapter.weights)
    table = {path: module for path, module in layer_modules(checkpoint.spec).items() if not module.is_fused}
    stored = stored_tensors(folder)
    _check(adapter, table, {_canonical(name) for name in stored})
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix in (".json", ".jinja", ".model", ".txt"):
            shutil.copyfile(file, target / file.name)
    for file in sorted({tensor.file for tensor in stored.values()}):
        own = {name: tensor for name, tensor in stored.items() if tensor.file == file}
        save_file(
            dict(_merge_tensors(read_tensors(own), adapter, table)), target / file.name, metadata={"format": "pt"}
        )
    return len(adapter.weights)


def _merge_gguf(checkpoint: Checkpoint, adapter: LoraAdapter, target: Path) -> None:
    merged = merged_checkpoint(checkpoint, adapter)
    files = folder_files(checkpoint.tokenizer_source, checkpoint.spec)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8")
    tensors = dict(folder_tensors(merged.tensors(), checkpoint.spec))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def merged_checkpoint(checkpoint: Checkpoint, adapter: LoraAdapter) -> Checkpoint:
    """The base with the adapter merged into its tensors, under the base's digest. AdapterMismatch if it cannot be
    merged.
    """
    table = {path: module for path, module in layer_modules(checkpoint.spec).items() if not module.is_fused}
    _check(adapter, table, expected_tensors(checkpoint.spec).keys())

    def tensors() -> Iterator[tuple[str, NDArray[Any]]]:
        return _merge_tensors(checkpoint.tensors(), adapter, table, in_float32=True)

    return replace(checkpoint, tensors=tensors, tensors_digest="")


def _check(adapter: LoraAdapter, table: dict[str, Module], stored: Collection[str]) -> None:
    unsupported = sorted(adapter.features - MERGEABLE_FEATURES)
    if unsupported:
        raise AdapterMismatch(
            f"{' and '.join(unsupported)} cannot be merged into the base's tensors; serve the adapter"
        )
    if adapter.magnitudes and adapter.delta_biases:
        raise AdapterMismatch("DoRA with lora_bias cannot be merged; serve the adapter")
    found = {key for path, module in table.items() if f"{path}.weight" in stored for key in module.keys}
    biased = {key for path, module in table.items() if f"{path}.bias" in stored for key in module.keys}
    missing = sorted(str(key) for key in {*adapter.weights} - found) + sorted(
        f"the bias of {key}" for key in {*adapter.delta_biases} - biased
    )
    missing += sorted(name for name in adapter.replaced if name not in stored)
    if missing:
        raise AdapterMismatch(f"the base's files have no tensor of their own for {missing[0]}; serve the adapter")


def _merge_tensors(
    tensors: Iterable[tuple[str, NDArray[Any]]],
    adapter: LoraAdapter,
    table: dict[str, Module],
    *,
    in_float32: bool = False,
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every tensor by its own name, merged where the adapter touches it."""
    for name, tensor in tensors:
        path, _, kind = _canonical(name).rpartition(".")
        values = adapter.replaced.get(f"{path}.{kind}")
        if path in table and (key := table[path].keys[0]) in adapter.weights:
            base = tensor.astype(np.float32) if values is None else values  # a trained bias may have lora_B's, too
            added = adapter.delta_biases.get(key, np.float32(0))
            values = _weight(base, adapter, key) if kind == "weight" else base + added
        yield (
            name,
            tensor if values is None else np.ascontiguousarray(values if in_float32 else values.astype(tensor.dtype)),
        )


def _canonical(name: str) -> str:
    """The canonical name of a stored tensor; Mixtral's experts have older names."""
    path, dot, kind = name.rpartition(".")
    return f"{canonical_module(path)}{dot}{kind}"


def _weight(base: NDArray[np.float32], adapter: LoraAdapter, key: LoraKey) -> NDArray[np.float32]:
    """[d_out, d_in]: W + B A, times DoRA's scale."""
    a, b = (to_float32(matrix) for matrix in adapter.weights[key])
    summed: NDArray[np.float32] = base + b.T @ a
    if key in adapter.magnitudes:
        summed = summed * dora_scale(adapter.magnitudes[key], base, a, b)[:, None]
    return summed
