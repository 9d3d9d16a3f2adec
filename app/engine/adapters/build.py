"""From an adapter as saved to an adapter as served, on one base model.

In: a `StoredAdapter` and the base's `ModelSpec`. Out: a `LoraAdapter`: shapes checked, every value
finite, fused modules split, the scale folded into b in float32, the arrays read-only. Whatever does
not fit is an error that names the module; nothing is skipped.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.card import AdapterCard
from app.engine.adapters.limits import DEFAULT_LIMITS, ReadLimits
from app.engine.adapters.lora import LoraAdapter, LoraKey, LoraPair
from app.engine.adapters.modules import Module, layer_modules
from app.engine.adapters.stored import StoredAdapter, StoredModule, StoredTensor, content_digest
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterTooLarge
from app.engine.models.spec import ModelSpec


def build_adapter(stored: StoredAdapter, spec: ModelSpec, limits: ReadLimits = DEFAULT_LIMITS) -> LoraAdapter:
    """The adapter ready to serve. `AdapterMismatch`, `AdapterFormatError`, `AdapterTooLarge`."""
    if not stored.modules:
        raise AdapterMismatch(f"the adapter changes no module of '{spec.name}'; was it trained on another model?")
    table = layer_modules(len(spec.layers))
    weights: dict[LoraKey, LoraPair] = {}
    for module in stored.modules:
        place = table.get(module.path)
        if place is None:
            raise AdapterMismatch(
                f"module {short(module.path)} does not exist in '{spec.name}' ({len(spec.layers)} layers); "
                "the adapter was trained on another model"
            )
        d_in, d_outs = place.shape(spec)
        _check_shapes(module, d_in, d_outs, spec, limits)
        for key, pair in _fold(module, place, d_outs):
            if key in weights:
                raise AdapterFormatError(
                    f"module {short(module.path)} changes {key.target} of layer {key.layer} a second time; "
                    "save it either fused or split"
                )
            weights[key] = pair
    unique_arrays = {id(array): array.nbytes for pair in weights.values() for array in pair}
    card = AdapterCard(
        digest=content_digest(stored, spec.digest),
        base_digest=spec.digest,
        max_rank=max(pair.rank for pair in weights.values()),
        targets=tuple(sorted({key.target for key in weights})),
        dtype=",".join(sorted({tensor.dtype for module in stored.modules for tensor in (module.a, module.b)})),
        size_bytes=sum(unique_arrays.values()),
        description=stored.description,
    )
    return LoraAdapter(card, MappingProxyType(dict(sorted(weights.items()))))


def _check_shapes(
    module: StoredModule, d_in: int, d_outs: tuple[int, ...], spec: ModelSpec, limits: ReadLimits
) -> None:
    a, b = module.a.shape, module.b.shape
    if len(a) != 2 or len(b) != 2 or a[0] < 1 or a[0] != b[1]:
        raise AdapterFormatError(f"{module.path}: lora_A {list(a)} and lora_B {list(b)} are not [r, in] and [out, r]")
    if a[0] > limits.max_rank:
        raise AdapterTooLarge(f"{module.path}: rank {a[0]} but at most {limits.max_rank}; train at a lower rank")
    if a[1] != d_in or b[0] != sum(d_outs):
        raise AdapterMismatch(
            f"{module.path}: the adapter maps {a[1]} to {b[0]} but the module of '{spec.name}' maps "
            f"{d_in} to {sum(d_outs)}; it was trained on another model"
        )


def _fold(module: StoredModule, place: Module, d_outs: tuple[int, ...]) -> list[tuple[LoraKey, LoraPair]]:
    """One pair per target; a fused module's A is shared by its targets, not copied."""
    a = _finite(module.a, module.path, "lora_A")  # [r, d_in]
    b = _finite(module.b, module.path, "lora_B")  # [d_out, r]
    a.setflags(write=False)
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked, with a name, below
        b *= np.float32(module.scale)
    if not np.isfinite(b).all():
        raise AdapterFormatError(f"{module.path}: lora_B times its scale {module.scale} leaves float32; lower alpha")
    pairs = []
    start = 0
    for target, d_out in zip(place.targets, d_outs, strict=True):
        part = np.array(b[start : start + d_out].T, order="C")  # [r, d_out], own memory
        part.setflags(write=False)
        pairs.append((LoraKey(place.layer, target), LoraPair(a, part)))
        start += d_out
    return pairs


def _finite(tensor: StoredTensor, path: str, half: str) -> NDArray[np.float32]:
    values = tensor.to_float32()
    finite = np.isfinite(values)
    if not finite.all():
        row, column = (int(index) for index in np.argwhere(~finite)[0])
        raise AdapterFormatError(
            f"{path}: {half}[{row}, {column}] is {values[row, column]}; the adapter is broken, train it again"
        )
    return values
