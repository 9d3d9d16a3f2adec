"""LoRAs of single experts put together as PEFT saves them: the way back of `peft_experts`.

In: an adapter's modules. Out: tensors of whole layers of experts, the names for `target_parameters`, and the modules
that are left. PEFT has all experts of a layer at one rank and alpha; an adapter of other shape stays a card.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from app.engine.adapters.formats.peft_experts import PARAMETERS, bits_of, tensor_of
from app.engine.adapters.stored import StoredModule
from app.engine.errors import AdapterFormatError

_ONE = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate_up_proj|down_proj)")


class FusedExperts(NamedTuple):
    """One parameter of a layer as a module in all but its name. path: what PEFT wraps; place: where its tensors are."""

    module: StoredModule
    place: str


def fuse(modules: Iterable[StoredModule]) -> tuple[list[FusedExperts], list[StoredModule]]:
    """(experts by parameter, the other modules). AdapterFormatError where PEFT cannot have them so."""
    by_parameter: dict[str, dict[str, list[tuple[int, StoredModule]]]] = {}
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
            found.append(FusedExperts(_together(f"{container}.{name}", sorted(members, key=lambda m: m[0])), place))
    return found, rest


def _together(path: str, members: list[tuple[int, StoredModule]]) -> StoredModule:
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
    return StoredModule(path, *whole, first.alpha, first.use_rslora)
