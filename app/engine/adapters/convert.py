"""Adapters from one stored form to another: PEFT folder, Arrow card, quantised or not.

In: a `StoredAdapter` from any reader. Out: files, or the same adapter with its tensors rounded. What
is written reads back as the same tensors and scales bit for bit, so the digest is the same; rounding
is the one step that changes it, and says by how much.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from app.engine.adapters.peft_config import CONFIG_NAME
from app.engine.adapters.peft_file import HALVES, PREFIX, WEIGHTS_NAME
from app.engine.adapters.quantize import Quantization, delta_error, quantize
from app.engine.adapters.safetensors_file import write_safetensors
from app.engine.adapters.stored import QUANTIZED_BITS, StoredAdapter, StoredModule, StoredTensor, require_plain
from app.engine.errors import AdapterFormatError


def write_peft_folder(folder: Path, stored: StoredAdapter) -> None:
    """Write `stored` so that PEFT, and `read_peft`, read the same adapter. Quantised tensors become F32."""
    require_plain(stored)
    config = _config(stored)
    tensors = {}
    for module in stored.modules:
        for suffix, half in HALVES.items():
            tensor = module.a if half == "lora_A" else module.b
            tensors[f"{PREFIX}{module.path}{suffix}"] = _plain(tensor)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_safetensors(folder / WEIGHTS_NAME, tensors)


def quantize_adapter(stored: StoredAdapter, dtype: str) -> tuple[StoredAdapter, Quantization]:
    """`stored` with every tensor in `dtype` ("I8" or "I4"), and what that cost, measured per module."""
    if dtype not in QUANTIZED_BITS:
        raise AdapterFormatError(f"adapters are quantised to {' or '.join(QUANTIZED_BITS)}, not {dtype!r}")
    require_plain(stored)
    modules, errors = [], []
    for module in stored.modules:
        a, b = _rounded(module.a, dtype), _rounded(module.b, dtype)
        modules.append(replace(module, a=a, b=b))
        originals = module.a.to_float32(), module.b.to_float32()
        errors.append(delta_error(*originals, a.to_float32(), b.to_float32()))
    report = Quantization(dtype, max(errors), sum(errors) / len(errors))
    return replace(stored, modules=tuple(modules)), report


def _rounded(tensor: StoredTensor, dtype: str) -> StoredTensor:
    data, scales = quantize(tensor.to_float32(), dtype)
    return StoredTensor(dtype, tensor.shape, memoryview(data), memoryview(scales))


def _plain(tensor: StoredTensor) -> StoredTensor:
    if tensor.dtype not in QUANTIZED_BITS:
        return tensor
    values = tensor.to_float32().astype("<f4")
    return StoredTensor("F32", tensor.shape, memoryview(values.tobytes()))


def _config(stored: StoredAdapter) -> dict[str, object]:
    """A PEFT configuration that selects exactly the modules present, with their ranks and alphas."""
    rslora = {module.use_rslora for module in stored.modules}
    if len(rslora) != 1:
        raise AdapterFormatError("PEFT cannot mix rsLoRA and plain modules in one adapter; convert it as a card")
    rank = Counter(module.rank for module in stored.modules).most_common(1)[0][0]
    alpha = Counter(module.alpha for module in stored.modules).most_common(1)[0][0]
    return {
        "alpha_pattern": {module.path: module.alpha for module in stored.modules if module.alpha != alpha},
        "bias": "none",
        "lora_alpha": alpha,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {module.path: module.rank for module in stored.modules if module.rank != rank},
        "task_type": "CAUSAL_LM",
        "use_rslora": rslora.pop(),
    } | _targets(stored.modules)


def _targets(modules: tuple[StoredModule, ...]) -> dict[str, object]:
    """Short names where every layer named has the same modules, else every path in full."""
    by_layer: dict[int, set[str]] = {}
    for module in modules:
        parts = module.path.split(".")
        if len(parts) < 4:  # lm_head
            return {"target_modules": [other.path for other in modules]}
        by_layer.setdefault(int(parts[2]), set()).add(parts[-1])
    names = next(iter(by_layer.values()))
    if all(other == names for other in by_layer.values()):
        return {"target_modules": sorted(names), "layers_to_transform": sorted(by_layer)}
    return {"target_modules": [module.path for module in modules]}
