"""Renames checkpoints' tensors of experts to canonical names: one matrix [d_out, d_in] per expert and module.

For example "model.layers.0.mlp.experts.3.gate_proj.weight". Checkpoints store these, or Mixtral's older names, or all
experts of a layer in one tensor, with gate's and up's rows concatenated or apart, and biases likewise
("experts.gate_proj_bias"). Other names stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from app.engine.errors import CheckpointError

_MIXTRAL = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.(?:experts\.(\d+)\.(w[123])|gate)")
_MIXTRAL_MODULES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(_bias)?")


def canonical_module(path: str) -> str:
    """The canonical path of a module with one of Mixtral's older names; any other path unchanged."""
    old = _MIXTRAL.fullmatch(path)
    if old is None:
        return path
    layer, expert, module = old.groups()
    return f"{layer}.mlp." + ("gate" if expert is None else f"experts.{expert}.{_MIXTRAL_MODULES[module]}")


def mixtral_module(path: str) -> str:
    """The opposite: Mixtral's older spelling of a canonical path."""
    for old, new in _MIXTRAL_MODULES.items():
        if ".mlp.experts." in path and path.endswith(f".{new}"):
            return path.removesuffix(new).replace(".mlp.", ".block_sparse_moe.") + old
    return path.replace(".mlp.gate", ".block_sparse_moe.gate") if path.endswith(".mlp.gate") else path


def canonical_shapes(stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every canonical tensor. CheckpointError if two stored tensors have the same canonical name."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        for canonical, part in _parts(name, shape):
            if canonical in found:
                raise CheckpointError(f"tensor {canonical!r} is stored twice, the second time in {name!r}")
            found[canonical] = shape if part is None else (part.stop - part.start, *shape[2:])
    return found


def canonical_tensors(stored: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every tensor under its canonical name; those from one stored tensor are views of it."""
    for name, values in stored:
        for canonical, part in _parts(name, values.shape):
            yield canonical, values if part is None else values[_expert(canonical), part]


def _parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, slice | None]]:
    """Canonical names in a stored tensor, each with its rows of its expert, or None for the whole tensor."""
    if (fused := _FUSED.fullmatch(name)) is None:
        module, dot, kind = name.rpartition(".")
        yield f"{canonical_module(module)}{dot}{kind}", None
        return
    experts, kind, is_bias = fused.groups()
    modules = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    if len(shape) != (2 if is_bias else 3) or shape[1] % len(modules):
        needed = "[experts, outputs]" if is_bias else "[experts, outputs, inputs]"
        raise CheckpointError(f"tensor {name!r} has shape {list(shape)}; {needed} is needed")
    size = shape[1] // len(modules)
    for expert in range(shape[0]):
        for index, module in enumerate(modules):
            yield (
                f"{experts}.{expert}.{module}.{'bias' if is_bias else 'weight'}",
                slice(index * size, (index + 1) * size),
            )


def _expert(canonical: str) -> int:
    return int(canonical.rsplit(".", 3)[1])
