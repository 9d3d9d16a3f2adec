"""Converts adapters between formats: writes PEFT folders, and quantises.

Written files read back as the same tensors and scales bit for bit, so the digest stays the same. Only quantising
changes values, and it reports the error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from app.engine.adapters.adapter_tokenizer import AdapterTokenizer, write_adapter_tokenizer
from app.engine.adapters.card import TRAINED_ON
from app.engine.adapters.formats.peft_config import CLASSIFIES, CONFIG_NAME
from app.engine.adapters.formats.peft_experts import FusedExperts, fuse_experts
from app.engine.adapters.formats.peft_file import (
    EMBEDDING_HALVES,
    HALVES,
    LORA_BIAS,
    MAGNITUDE,
    TOKEN_ROWS,
    WEIGHTS_NAME,
)
from app.engine.adapters.formats.safetensors_file import write_safetensors
from app.engine.adapters.formats.tensor_names import PREFIX
from app.engine.adapters.quantize import Quantization, delta_error, quantize
from app.engine.adapters.raw_adapter import EMBEDDING_PATH, QUANTIZED_BITS, RawAdapter, RawModule, RawTensor
from app.engine.adapters.score_head import is_head
from app.engine.errors import AdapterFormatError
from app.engine.models.linear_modules import ROUTERS

#: PEFT trains a router's weight with `target_parameters`.
_ROUTER_PATHS = tuple(f".mlp.{name}" for name in ROUTERS)


def write_peft_folder(folder: Path, raw: RawAdapter) -> None:
    """Write a folder that PEFT and `read_raw_peft` read as the same adapter. Quantised tensors become F32."""
    experts, modules = fuse_experts(
        replace(module, a=_dequantize_tensor(module.a), b=_dequantize_tensor(module.b)) for module in raw.modules
    )
    config = _config(raw, experts, modules)
    tensors: dict[str, RawTensor] = {}
    for one in experts:
        tensors |= {f"{PREFIX}{one.place}.lora_{half}.weight": getattr(one.module, half.lower()) for half in "AB"}
    for module in modules:
        halves = EMBEDDING_HALVES if module.path == EMBEDDING_PATH else HALVES
        parts = {"lora_A": module.a, "lora_B": module.b}
        tensors |= {f"{PREFIX}{module.path}{suffix}": parts[half] for suffix, half in halves.items()}
        for suffix, part in ((MAGNITUDE, module.magnitude), (LORA_BIAS, module.bias)):
            if part is not None:
                tensors[f"{PREFIX}{module.path}{suffix}"] = part
    adapted = {module.path for module in raw.modules}
    for name, tensor in raw.parameters:
        path, _, kind = name.rpartition(".")
        tensors[f"{PREFIX}{path}{'.base_layer' * (path in adapted)}.{kind}"] = tensor
    for rows in raw.token_rows:
        tensors[f"{PREFIX}{rows.path}{TOKEN_ROWS}"] = rows.rows
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_safetensors(folder / WEIGHTS_NAME, tensors)
    if raw.text:
        write_adapter_tokenizer(folder, AdapterTokenizer.from_json(raw.text))


def quantize_adapter(raw: RawAdapter, dtype: str) -> tuple[RawAdapter, Quantization]:
    """`raw` with every lora_A and lora_B in `dtype` ("I8" or "I4"), and the error measured per module.

    Magnitudes, biases, whole parameters and token rows stay as they are.
    """
    if dtype not in QUANTIZED_BITS:
        raise AdapterFormatError(f"adapters are quantised to {' or '.join(QUANTIZED_BITS)}, not {dtype!r}")
    modules, errors = [], []
    for module in raw.modules:
        a, b = _quantize_tensor(module.a, dtype), _quantize_tensor(module.b, dtype)
        modules.append(replace(module, a=a, b=b))
        originals = module.a.to_float32(), module.b.to_float32()
        errors.append(delta_error(*originals, a.to_float32(), b.to_float32()))
    report = Quantization(dtype, max(errors), sum(errors) / len(errors))
    return replace(raw, modules=tuple(modules)), report


def _quantize_tensor(tensor: RawTensor, dtype: str) -> RawTensor:
    data, scales = quantize(tensor.to_float32(), dtype)
    return RawTensor(dtype, tensor.shape, memoryview(data), memoryview(scales))


def _dequantize_tensor(tensor: RawTensor) -> RawTensor:
    if tensor.dtype not in QUANTIZED_BITS:
        return tensor
    values = tensor.to_float32().astype("<f4")
    return RawTensor("F32", tensor.shape, memoryview(values.tobytes()))


def _config(raw: RawAdapter, experts: Sequence[FusedExperts], modules: Sequence[RawModule]) -> dict[str, object]:
    """A PEFT configuration that selects exactly the modules present, with their ranks and alphas."""
    rslora = _uniform(raw.modules, [module.use_rslora for module in raw.modules], "rsLoRA")
    uses_dora = _uniform(raw.modules, [module.magnitude is not None for module in raw.modules], "DoRA")
    has_bias = _uniform(raw.modules, [module.bias is not None for module in raw.modules], "lora_bias")
    rank = Counter(module.rank for module in raw.modules).most_common(1)[0][0]
    alpha = Counter(module.alpha for module in raw.modules).most_common(1)[0][0]
    ranks = {module.path: module.rank for module in raw.modules}  # expert 0's stands for its whole layer
    wrapped = [(_wrapped_name(module), ranks[module.path], module.alpha) for module in modules]
    for one in experts:
        container, _, name = one.module.path.rpartition(".")
        wrapped.append((one.module.path, ranks[f"{container}.0.{name}"], one.module.alpha))
    optional: dict[str, object] = {"use_dora": True} if uses_dora else {}
    if has_bias:
        optional["lora_bias"] = True
    if raw.token_rows:
        optional["trainable_token_indices"] = {
            rows.path.rsplit(".", 1)[-1]: list(rows.token_ids) for rows in raw.token_rows
        }
    if (trained_on := json.loads(raw.metadata or "{}").get(TRAINED_ON)) is not None:
        optional[TRAINED_ON] = trained_on
    if raw.invocation_tokens:
        optional["alora_invocation_tokens"] = list(raw.invocation_tokens)
    bias, saved = _bias_and_modules_to_save(raw)
    if saved:
        optional["modules_to_save"] = saved
    return (
        {
            "alpha_pattern": {path: own_alpha for path, _, own_alpha in wrapped if own_alpha != alpha},
            "bias": bias,
            "lora_alpha": alpha,
            "peft_type": "LORA",
            "r": rank,
            "rank_pattern": {path: own_rank for path, own_rank, _ in wrapped if own_rank != rank},
            "task_type": CLASSIFIES if any(is_head(name) for name, _ in raw.parameters) else "CAUSAL_LM",
            "use_rslora": rslora,
        }
        | _target_modules([module for module in modules if _wrapped_name(module) == module.path])
        | _target_parameters([path for path, _, _ in wrapped if path not in {module.path for module in modules}])
        | optional
    )


def _wrapped_name(module: RawModule) -> str:
    """What PEFT wraps: the module, or a router's weight, since transformers' routers are no `nn.Linear`."""
    return f"{module.path}.weight" if module.path.endswith(_ROUTER_PATHS) else module.path


def _target_parameters(names: Sequence[str]) -> dict[str, object]:
    """peft_version says which layout these tensors have."""
    return {"target_parameters": list(names), "peft_version": "0.19.0"} if names else {}


def _uniform(modules: Sequence[RawModule], has: Sequence[bool], what: str) -> bool:
    """A property that PEFT has only for a whole adapter. AdapterFormatError if modules differ in it."""
    if len(set(has)) > 1:
        odd = modules[has.index(not has[0])].path
        raise AdapterFormatError(
            f"PEFT cannot mix modules with and without {what} in one adapter ({modules[0].path} and {odd} differ); "
            "convert it as a card"
        )
    return has[0]


def _bias_and_modules_to_save(raw: RawAdapter) -> tuple[str, list[str]]:
    """(`bias`, `modules_to_save`) that select exactly the parameters present.

    A module whose weight is replaced is saved whole; PEFT selects a score head itself. Lone biases are selected by
    `bias`: adapted modules' or all.
    """
    adapted = {module.path for module in raw.modules}
    kinds: dict[str, set[str]] = {}
    for name in (name for name, _ in raw.parameters if not is_head(name)):
        path, _, kind = name.rpartition(".")
        kinds.setdefault(path, set()).add(kind)
    biases = {path for path, found in kinds.items() if found == {"bias"}}
    bias = "none" if not biases else "lora_only" if biases <= adapted else "all"
    return bias, sorted(path for path, found in kinds.items() if "weight" in found and path not in adapted)


def _target_modules(modules: Sequence[RawModule]) -> dict[str, object]:
    """Short names if every named layer has the same modules, else full paths."""
    if not modules:
        return {"target_modules": []}
    by_layer: dict[int, set[str]] = {}
    for module in modules:
        parts = module.path.split(".")
        if len(parts) != 5:  # lm_head, and deeper modules: a shared expert's short names would also match other modules
            return {"target_modules": [other.path for other in modules]}
        by_layer.setdefault(int(parts[2]), set()).add(parts[-1])
    names = next(iter(by_layer.values()))
    if all(other == names for other in by_layer.values()):
        return {"target_modules": sorted(names), "layers_to_transform": sorted(by_layer)}
    return {"target_modules": [module.path for module in modules]}
