"""The tensors of adapter_model.safetensors, sorted by what their PEFT names mean.

An unknown name is an error. Whether a tensor should be present is for the configuration to say (`target_modules`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.engine.adapters.formats.tensor_names import PREFIX, TensorNames, plain_names
from app.engine.adapters.raw_adapter import EMBEDDING_PATH, RawTensor
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError

WEIGHTS_NAME = "adapter_model.safetensors"

#: Suffix → part of a LoRA module.
HALVES = {".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B"}
EMBEDDING_HALVES = {".lora_embedding_A": "lora_A", ".lora_embedding_B": "lora_B"}
LORA_BIAS, MAGNITUDE = ".lora_B.bias", ".lora_magnitude_vector"
_PARTS = {**HALVES, **EMBEDDING_HALVES, LORA_BIAS: "bias", MAGNITUDE: "magnitude"}
TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
_ROW_BASE = ".token_adapter.base_layer.weight"
#: DoRA's m before PEFT 0.11.
_OLDER_MAGNITUDE = f"{MAGNITUDE}.weight"
#: Tensors saved with a module of modules_to_save that PEFT does not load.
_UNUSED = re.compile(r"(?P<path>.+)\.(?P<part>modules_to_save|original_module)\.(?P<kind>weight|bias)")
#: State of training methods (VeLoRA, MonteCLoRA) that PEFT saves along and does not use in an evaluation.
_TRAINING_STATE = re.compile(r"velora_embed|monteclora_sampler[.\w]+")
_MAX_REPORTED = 10


@dataclass(frozen=True, slots=True)
class PeftTensors:
    """modules: path → part → tensor. parameters: base tensor name → tensor. token_rows: path → tensor. wrapped:
    parameters of a module that LoRA wraps, saved along with it (".base_layer."). row_bases: path → the matrix under
    token_rows, saved along with them. originals: base tensor name → the base's own tensor, saved beside the one that
    modules_to_save trains; twins are second names of the trained ones.
    """

    names: TensorNames
    modules: dict[str, dict[str, RawTensor]] = field(default_factory=dict)
    parameters: dict[str, RawTensor] = field(default_factory=dict)
    wrapped: dict[str, RawTensor] = field(default_factory=dict)
    token_rows: dict[str, RawTensor] = field(default_factory=dict)
    row_bases: dict[str, RawTensor] = field(default_factory=dict)
    originals: dict[str, RawTensor] = field(default_factory=dict)
    twins: set[str] = field(default_factory=set)


def sort_tensors(tensors: Mapping[str, RawTensor]) -> PeftTensors:
    """Sort every tensor. AdapterFormatError for an unknown name, or half a module."""
    _check_not_empty(tensors)
    found = PeftTensors(names=plain_names(tensors))
    for full_name, tensor in tensors.items():
        name = found.names.plain[full_name]
        if name.endswith(_OLDER_MAGNITUDE):
            name = name.removesuffix(".weight")
        if _TRAINING_STATE.fullmatch(name.rpartition(".lora_")[2]):
            continue
        suffix = next((suffix for suffix in _PARTS if name.endswith(suffix)), None)
        if suffix is None:
            _sort_whole(found, name, full_name, tensor)
            continue
        path = name.removesuffix(suffix)
        if suffix in HALVES | EMBEDDING_HALVES and (path == EMBEDDING_PATH) != (suffix in EMBEDDING_HALVES):
            raise _unknown_tensor(full_name)
        parts = found.modules.setdefault(path, {})
        if _PARTS[suffix] in parts:
            raise AdapterFormatError(
                f"{WEIGHTS_NAME}: {short(path)} has its {_PARTS[suffix]} twice, once as {short(full_name)}; keep one"
            )
        parts[_PARTS[suffix]] = tensor
    halves = [(path, {"lora_A", "lora_B"} - set(parts)) for path, parts in found.modules.items()]
    missing = [f"module {short(path)} has no {min(lacks)}" for path, lacks in sorted(halves) if lacks]
    if missing:
        more = f"; and {len(missing) - _MAX_REPORTED} more" if len(missing) > _MAX_REPORTED else ""
        raise AdapterFormatError(f"{WEIGHTS_NAME}: {'; '.join(missing[:_MAX_REPORTED])}{more}; save it whole")
    return found


def _check_not_empty(tensors: Mapping[str, RawTensor]) -> None:
    empty = [(name, tensor.shape) for name, tensor in tensors.items() if 0 in tensor.shape]
    if empty:
        name, shape = empty[0]
        raise AdapterFormatError(
            f"{WEIGHTS_NAME}: {len(empty)} of {len(tensors)} tensors are empty, such as {short(name)} of shape "
            f"{list(shape)}: the adapter was saved under DeepSpeed ZeRO-3 (or FSDP) while its weights were spread over "
            "the processes. Gather them: run the checkpoint folder's zero_to_fp32.py and save the adapter from its "
            "result, or train with stage3_gather_16bit_weights_on_model_save: true and save with the trainer's "
            "save_model, or call save_pretrained within deepspeed.zero.GatheredParameters"
        )


def _sort_whole(found: PeftTensors, name: str, full_name: str, tensor: RawTensor) -> None:
    """Sort a tensor that is not part of a LoRA."""
    unused = _UNUSED.fullmatch(name)
    if unused is not None:
        whole = f"{unused['path']}.{unused['kind']}"
        if unused["part"] == "original_module":
            found.originals[whole] = tensor
        else:
            found.twins.add(whole)
    elif name.endswith(TOKEN_ROWS):
        found.token_rows[name.removesuffix(TOKEN_ROWS)] = tensor
    elif name.endswith(_ROW_BASE):
        found.row_bases[name.removesuffix(_ROW_BASE)] = tensor
    elif name.endswith((".base_layer.weight", ".base_layer.bias")):
        found.wrapped[name.replace(".base_layer.", ".")] = tensor
    elif name.endswith((".weight", ".bias")) and ".lora_" not in name:
        found.parameters[name] = tensor
    else:
        raise _unknown_tensor(full_name)


def _unknown_tensor(name: str) -> AdapterFormatError:
    return AdapterFormatError(
        f"{WEIGHTS_NAME}: tensor {short(name)} is not understood; a LoRA adapter's tensors are "
        f"{PREFIX}<module>.lora_A.weight, .lora_B.weight and PEFT's additional tensors"
    )
