"""PEFT's LoRA on all experts of a layer at once (`target_parameters`): split into one LoRA per expert, and fused again.

The results are `RawModule`s such as "model.layers.0.mlp.experts.3.gate_up_proj", whose A serves gate and up. For E
experts of rank r, lora_A is [E * r, in] with the expert as the slowest index and lora_B [out, E * r] with the expert as
the *fastest* (PEFT's `ParamWrapper`). A container may have two pairs: the inner `experts.base_layer` is gate_up_proj's,
the outer `experts` down_proj's. A single pair is always the outer, so only the configuration says whose it is. Before
PEFT 0.19, in and out were swapped under the same names: shapes tell, or `peft_version` where both layouts have one
shape. One error reports all problems.

PEFT needs one rank and alpha for all experts of a layer; other adapters can only be cards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from app.engine.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME, PeftTensors
from app.engine.adapters.formats.target_modules import first_matching, matches_entry
from app.engine.adapters.raw_adapter import (
    QUANTIZED_BITS,
    RawAdapter,
    RawModule,
    RawTensor,
    bits_of,
    tensor_of,
)
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, AdapterMismatch
from app.engine.models.spec import ModelSpec

#: In the order in which PEFT wraps them, innermost first.
PARAMETERS = ("gate_up_proj", "down_proj")
_CONTAINER = re.compile(r"(model\.layers\.(\d{1,4})\.mlp\.experts)(?:\.base_layer)?")
_HALF = re.compile(r"(model\.layers\.(\d+)\.mlp\.experts\.\d+)\.(gate_proj|up_proj)")
_ONE = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate_up_proj|down_proj)")
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})")
#: The first PEFT version whose lora_A is [E * r, d_in] for every kind of experts.
_FIRST_NEW = (0, 19, 0)
_MAX_REPORTED = 10


class _Pair(NamedTuple):
    """One parameter's lora_A and lora_B. name: "model.layers.0.mlp.experts.down_proj"."""

    name: str
    a: RawTensor
    b: RawTensor


def is_fused(path: str) -> bool:
    """Whether a module path means all experts of a layer."""
    return _CONTAINER.fullmatch(path) is not None


def selects_parameter(config: PeftConfig, name: str) -> bool:
    """Whether `target_parameters` names this parameter, in full or by its end after a dot."""
    return matches_entry(name, config.target_parameters)


def expert_modules(config: PeftConfig, found: PeftTensors, spec: ModelSpec | None) -> list[RawModule]:
    """Every expert's LoRA from the fused modules in `found`, which may contain others too.

    Raises AdapterMismatch or AdapterFormatError listing all problems. spec: None if the base is unknown.
    """
    fused = {path: parts for path, parts in found.modules.items() if is_fused(path)}
    problems: list[str] = []
    pairs = list(_pairs(config, fused, spec, problems))
    trained = {pair.name: found.names.name_in_training(pair.name) for pair in pairs}
    names = list(trained.values())
    ranks = first_matching(list(config.rank_pattern), names, "rank_pattern")
    alphas = first_matching(list(config.alpha_pattern), names, "alpha_pattern")
    modules: list[RawModule] = []
    for pair in pairs:
        name = trained[pair.name]
        rank = config.rank_pattern[ranks[name]] if name in ranks else config.rank
        alpha = config.alpha_pattern[alphas[name]] if name in alphas else config.alpha
        modules += _split(pair, rank, alpha, config, spec, problems)
    if problems:
        more = f"; and {len(problems) - _MAX_REPORTED} more" if len(problems) > _MAX_REPORTED else ""
        raise AdapterMismatch(f"{WEIGHTS_NAME}: {'; '.join(problems[:_MAX_REPORTED])}{more}")
    return modules


def _pairs(
    config: PeftConfig, fused: Mapping[str, Mapping[str, RawTensor]], spec: ModelSpec | None, problems: list[str]
) -> Iterator[_Pair]:
    if spec is None:
        layers = sorted({int(match[2]) for match in map(_CONTAINER.fullmatch, fused) if match})
    else:
        layers = [index for index, layer in enumerate(spec.layers) if layer.experts is not None]
    remaining = dict(fused)
    for layer in layers:
        container = f"model.layers.{layer}.mlp.experts"
        chosen = [name for name in PARAMETERS if selects_parameter(config, f"{container}.{name}")]
        places = [container] if len(chosen) == 1 else [f"{container}.base_layer", container]
        for name, place in zip(chosen, places, strict=bool(chosen)):
            parts = remaining.pop(place, None)
            if parts is None:
                problems.append(f"{container}.{name} is selected by target_parameters but has no tensors")
                continue
            extra = sorted(set(parts) - {"lora_A", "lora_B"})
            if extra:
                problems.append(f"{place} has a {extra[0]}, which PEFT does not train on experts")
                continue
            yield _Pair(f"{container}.{name}", parts["lora_A"], parts["lora_B"])
    for path in sorted(remaining):
        match = _CONTAINER.fullmatch(path)
        assert match is not None, "only containers are here"
        if spec is not None and int(match[2]) not in layers:
            problems.append(f"{short(path)} is of experts, but layer {match[2]} of '{spec.name}' has none")
        else:
            problems.append(
                f"{short(path)} is not selected by target_parameters {short(config.target_parameters)} of {CONFIG_NAME}"
            )


def _split(
    pair: _Pair, rank: int, alpha: float, config: PeftConfig, spec: ModelSpec | None, problems: list[str]
) -> Iterator[RawModule]:
    """One expert after the other, in the standard layout: a [r, d_in], b [d_out, r]."""
    a, b = pair.a.shape, pair.b.shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % rank:
        problems.append(
            f"{pair.name}: lora_A {list(a)} and lora_B {list(b)} do not divide into experts of rank {rank}; "
            "fix r or rank_pattern"
        )
        return
    num_experts = a[0] // rank
    is_new: bool | None
    if spec is None:
        is_new = _is_new(config.peft_version)
    else:
        layer = spec.layers[int(pair.name.split(".")[2])]
        assert layer.experts is not None, "pairs are of layers with experts"
        if num_experts != layer.experts.router.num_experts:
            problems.append(
                f"{pair.name}: lora_A {list(a)} of rank {rank} is of {num_experts} experts, but '{spec.name}' has "
                f"{layer.experts.router.num_experts}"
            )
            return
        wide = layer.mlp.intermediate_size
        sizes = (spec.hidden_size, 2 * wide) if pair.name.endswith("gate_up_proj") else (wide, spec.hidden_size)
        if (a[1], b[0]) not in (sizes, sizes[::-1]):
            problems.append(
                f"{pair.name}: the adapter maps {a[1]} to {b[0]}, but an expert of '{spec.name}' maps {sizes[0]} to "
                f"{sizes[1]}"
            )
            return
        is_new = (a[1], b[0]) == sizes if sizes[0] != sizes[1] else _is_new(config.peft_version)
        if layer.experts.alternates:  # these families' parameters are transposed, and PEFT never swapped them
            is_new = True if (a[1], b[0]) == sizes else None
    if is_new is None:
        problems.append(
            f"{pair.name}: lora_A {list(a)} may be [experts * r, in] or, before PEFT 0.19, [experts * r, out]; "
            f"peft_version {short(config.peft_version)} in {CONFIG_NAME} does not say"
        )
        return
    container, _, name = pair.name.rpartition(".")
    for expert, (own_a, own_b) in enumerate(_experts(pair, num_experts, is_new=is_new)):
        yield RawModule(f"{container}.{expert}.{name}", own_a, own_b, alpha, config.use_rslora)


def _experts(pair: _Pair, num_experts: int, *, is_new: bool) -> Iterator[tuple[RawTensor, RawTensor]]:
    by_rank = bits_of(pair.a).reshape(num_experts, -1, pair.a.shape[1])  # [E, r, in], or [E, r, out]
    by_place = bits_of(pair.b).reshape(pair.b.shape[0], -1, num_experts)  # [out, r, E], or [in, r, E]
    for expert in range(num_experts):
        a, b = by_rank[expert], by_place[:, :, expert]
        first, second = (a, b) if is_new else (b.T, a.T)
        yield tensor_of(pair.a.dtype, first), tensor_of(pair.b.dtype, second)


def _is_new(version: str) -> bool | None:
    """Whether this PEFT version writes today's layout; None if the version does not tell."""
    match = _VERSION.match(version)
    if match is None:
        return None
    numbers = tuple(map(int, match.groups()))
    if numbers == _FIRST_NEW and version != match[0]:
        return None  # a development version of 0.19.0
    return numbers >= _FIRST_NEW


def check_options(config: PeftConfig) -> None:
    """AdapterFormatError for options that PEFT refuses with `target_parameters`."""
    for key in ("use_dora", "lora_bias", "fan_in_fan_out"):
        if config.target_parameters and getattr(config, key):
            raise AdapterFormatError(f"{CONFIG_NAME}: '{key}' with target_parameters, which PEFT does not support")


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
