"""Fuses LoRAs of single experts into PEFT's format: the opposite of `peft_experts`.

PEFT needs one rank and alpha for all experts of a layer; other adapters can only be cards. Given the base, separate
gate and up LoRAs from before transformers 5 become one LoRA for gate_up_proj, as PEFT converts them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from app.engine.adapters.formats.peft_experts import PARAMETERS, bits_of, tensor_of
from app.engine.adapters.raw_adapter import QUANTIZED_BITS, RawAdapter, RawModule
from app.engine.errors import AdapterFormatError
from app.engine.models.spec import ModelSpec

_HALF = re.compile(r"(model\.layers\.(\d+)\.mlp\.experts\.\d+)\.(gate_proj|up_proj)")
_ONE = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate_up_proj|down_proj)")


class FusedExperts(NamedTuple):
    """One parameter of a layer, as a module whose path is what PEFT wraps; place: where its tensors are in the file."""

    module: RawModule
    place: str


def fuse_experts(modules: Iterable[RawModule]) -> tuple[list[FusedExperts], list[RawModule]]:
    """(fused experts by parameter, the other modules). AdapterFormatError if PEFT cannot represent them."""
    by_parameter: dict[str, dict[str, list[tuple[int, RawModule]]]] = {}
    rest = []
    for module in modules:
        match = _ONE.fullmatch(module.path)
        if match is None:
            rest.append(module)
        else:
            container, expert, name = match.groups()
            by_parameter.setdefault(container, {}).setdefault(name, []).append((int(expert), module))
    found = []
    for container, parameters in by_parameter.items():
        for name, members in parameters.items():
            inner = len(parameters) == len(PARAMETERS) and name == PARAMETERS[0]
            place = f"{container}.base_layer" if inner else container
            found.append(
                FusedExperts(_stack_experts(f"{container}.{name}", sorted(members, key=lambda m: m[0])), place)
            )
    return found, rest


def _stack_experts(path: str, members: list[tuple[int, RawModule]]) -> RawModule:
    first = members[0][1]
    kinds = {(m.a.shape, m.b.shape, m.a.dtype, m.b.dtype, m.alpha, m.use_rslora) for _, m in members}
    if [expert for expert, _ in members] != list(range(len(members))) or len(kinds) > 1:
        raise AdapterFormatError(
            f"{path}: PEFT has all experts of a layer at one rank, alpha and type, which the {len(members)} of this "
            "adapter are not; convert it as a card"
        )
    a = np.concatenate([bits_of(m.a) for _, m in members])  # [E * r, in]
    b = np.stack([bits_of(m.b) for _, m in members], axis=2).reshape(first.b.shape[0], -1)  # [out, r * E]
    whole = tensor_of(first.a.dtype, a), tensor_of(first.b.dtype, b)
    return RawModule(path, *whole, first.alpha, first.use_rslora)


def fuse_gate_up(raw: RawAdapter, spec: ModelSpec) -> RawAdapter:
    """The same deltas with one LoRA for gate and up of each expert: the A's stacked, the B's on a diagonal.

    Rank and alpha double, as in PEFT's own conversion, so the scale stays. AdapterFormatError if the two differ in
    rank, dtype or scale, or are quantised.
    """
    halves: dict[str, dict[str, RawModule]] = {}
    modules: list[RawModule] = []
    for module in raw.modules:
        match = _HALF.fullmatch(module.path)
        if match is None:
            modules.append(module)
        else:
            halves.setdefault(match[1], {})[match[3]] = module
    for path, found in halves.items():
        experts = spec.layers[int(path.split(".")[2])].experts
        alternates = experts is not None and experts.alternates
        modules.append(_gate_up(f"{path}.gate_up_proj", found, alternates=alternates))
    return replace(raw, modules=tuple(sorted(modules, key=lambda module: module.path)))


def _gate_up(path: str, halves: dict[str, RawModule], *, alternates: bool) -> RawModule:
    """alternates: gate's and up's outputs alternate; otherwise gate's come first."""
    kinds = {(one.a.shape, one.b.shape, one.a.dtype, one.b.dtype, one.alpha, one.use_rslora) for one in halves.values()}
    first = next(iter(halves.values()))
    if len(kinds) > 1 or {first.a.dtype, first.b.dtype} & set(QUANTIZED_BITS):
        raise AdapterFormatError(
            f"{path}: gate and up differ in rank, type or scale, or are quantised, so PEFT has no parameter for both; "
            "convert it without --base, or as a card"
        )
    count = len(halves)
    width, rank = first.b.shape
    a = np.concatenate([bits_of(one.a) for one in halves.values()])  # [count * r, in]
    b = np.zeros((2, width, count * rank), bits_of(first.b).dtype)
    for n, (name, one) in enumerate(halves.items()):
        b[0 if name == "gate_proj" else 1, :, n * rank : (n + 1) * rank] = bits_of(one.b)
    both = b.swapaxes(0, 1).reshape(2 * width, -1) if alternates else b.reshape(2 * width, -1)
    alpha = first.alpha * (math.sqrt(count) if first.use_rslora else count)
    return RawModule(path, tensor_of(first.a.dtype, a), tensor_of(first.b.dtype, both), alpha, first.use_rslora)
