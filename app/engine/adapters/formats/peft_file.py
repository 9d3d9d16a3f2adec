"""The tensors of adapter_model.safetensors, by what PEFT's names say they are.

In: name → tensor. Out: `PeftTensors`: LoRA parts by module, whole parameters by name, rows by
module. A name that says nothing known is an error here; whether what it names should be there is
for the configuration to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.engine.adapters.stored import EMBEDDING_PATH, StoredTensor
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."

#: Ending of a name → part of a LoRA module.
HALVES = {".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B"}
EMBEDDING_HALVES = {".lora_embedding_A": "lora_A", ".lora_embedding_B": "lora_B"}
LORA_BIAS, MAGNITUDE = ".lora_B.bias", ".lora_magnitude_vector"
_PARTS = {**HALVES, **EMBEDDING_HALVES, LORA_BIAS: "bias", MAGNITUDE: "magnitude"}
TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"


@dataclass(frozen=True, slots=True)
class PeftTensors:
    """modules: path → part → tensor. parameters: name in the base → tensor. token_rows: path → tensor.

    `wrapped` are parameters of a module that LoRA wraps, saved along with it (".base_layer.").
    """

    modules: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    parameters: dict[str, StoredTensor] = field(default_factory=dict)
    wrapped: dict[str, StoredTensor] = field(default_factory=dict)
    token_rows: dict[str, StoredTensor] = field(default_factory=dict)


def sort_tensors(tensors: Mapping[str, StoredTensor]) -> PeftTensors:
    """Every tensor in its place. `AdapterFormatError` for a name not understood or half a module."""
    found = PeftTensors()
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(PREFIX)
        suffix = next((suffix for suffix in _PARTS if name.endswith(suffix)), None)
        if name == full_name:
            raise _not_understood(full_name)
        if suffix is not None:
            path = name.removesuffix(suffix)
            if suffix in HALVES | EMBEDDING_HALVES and (path == EMBEDDING_PATH) != (suffix in EMBEDDING_HALVES):
                raise _not_understood(full_name)
            found.modules.setdefault(path, {})[_PARTS[suffix]] = tensor
        elif name.endswith(TOKEN_ROWS):
            found.token_rows[name.removesuffix(TOKEN_ROWS)] = tensor
        elif name.endswith((".base_layer.weight", ".base_layer.bias")):
            found.wrapped[name.replace(".base_layer.", ".")] = tensor
        elif name.endswith((".weight", ".bias")) and ".lora_" not in name:
            found.parameters[name] = tensor
        else:
            raise _not_understood(full_name)
    for path, parts in found.modules.items():
        missing = {"lora_A", "lora_B"} - set(parts)
        if missing:
            raise AdapterFormatError(f"{WEIGHTS_NAME}: module {short(path)} has no {missing.pop()}; save it whole")
    return found


def _not_understood(name: str) -> AdapterFormatError:
    return AdapterFormatError(
        f"{WEIGHTS_NAME}: tensor {short(name)} is not understood; a LoRA adapter's tensors are "
        f"{PREFIX}<module>.lora_A.weight, .lora_B.weight and what PEFT saves beside them"
    )
