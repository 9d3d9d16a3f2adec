"""Reads a Hugging Face folder of safetensors, whole or sharded, in the stored dtypes (bfloat16 through ml_dtypes).

A shard index is checked: each tensor is exactly where the index says, in a file inside the folder. Pickled weights are
not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy before safetensors asks for it)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from app.engine.errors import CheckpointError

_DTYPES = ("F32", "F16", "BF16")
#: Suffixes of quantised tensors' names (`gpt_oss`), and their dtype.
_BLOCKS, _BLOCK_DTYPES = ("_blocks", "_scales"), ("U8",)
#: Old encoder checkpoints store the numbers 0, 1, 2, … as a tensor.
_NUMBERS = "embeddings.position_ids"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's file, shape and stored type, by safetensors' name."""

    file: Path
    shape: tuple[int, ...]
    dtype: str = "F32"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; CheckpointError names the file if it is missing or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in name order."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    names = sorted({str(name) for name in _weight_map(folder).values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{_INDEX} names the file {name!r}; a *.safetensors beside it is needed")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks the shard {name!r} that its index names")
    return [folder / name for name in names]


def stored_tensors(folder: Path, *, is_quantised: bool = False) -> dict[str, TensorPlace]:
    """Name -> place, from the headers alone. Refuses types that this project cannot read unless `is_quantised`."""
    found: dict[str, TensorPlace] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a mapping)
                    if name.endswith(_NUMBERS):
                        continue
                    view = opened.get_slice(name)
                    readable = _BLOCK_DTYPES if name.endswith(_BLOCKS) else _DTYPES
                    if not is_quantised and view.get_dtype() not in readable:
                        raise CheckpointError(
                            f"tensor {name!r} is stored as {view.get_dtype()}; readable are {', '.join(_DTYPES)}"
                        )
                    if name in found:
                        raise CheckpointError(f"tensor {name!r} is in {found[name].file.name} and in {file.name}")
                    found[name] = TensorPlace(file, tuple(view.get_shape()), view.get_dtype())
        except SafetensorError as error:
            raise CheckpointError(f"{file} is not a valid safetensors file: {error}") from error
    if not (folder / _SINGLE).is_file():
        for name, file_name in _weight_map(folder).items():
            if name.endswith(_NUMBERS):
                continue
            if name not in found or found[name].file.name != file_name:
                raise CheckpointError(f"tensor {name!r} is not in {file_name}, where the index says it is")
    return found


def read_tensors(tensors: dict[str, TensorPlace]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Each tensor in its stored dtype, one at a time, file by file."""
    by_file: dict[Path, list[str]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(tensor.file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="numpy") as opened:
            for name in names:
                yield name, np.asarray(opened.get_tensor(name))


def _weight_map(folder: Path) -> dict[str, Any]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / _INDEX} has no weight_map")
    return weight_map
