"""gpt-oss: defaults for its `config.json`, and its experts' tensors under canonical names.

All experts of a layer are stored in one tensor [experts, inputs, outputs], with gate's and up's outputs alternating;
the two large ones may be MXFP4 blocks of 4 bits (OCP 2023): [experts, outputs, groups, 16] bytes of two numbers each,
with an exponent per group of 32. Each becomes one matrix [d_out, d_in] and one bias per expert and module; MXFP4
becomes float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import CheckpointError

FAMILY = "gpt_oss"
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
#: transformers' default for rotary embeddings.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
#: The values of four bits: a sign, two bits of exponent, one of mantissa.
_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])


def llama_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with this family's defaults, without the quantisation that `canonical_tensors` undoes."""
    quantisation = config.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
    if method not in (None, "mxfp4"):
        raise CheckpointError(f"config key 'quantization_config' has quant_method {method!r}; only 'mxfp4' is read")
    found = {"rope_theta": 150_000.0, "rope_parameters": _ROPE, "attention_bias": True, **config}
    found.pop("quantization_config", None)
    return found


def canonical_shapes(stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every canonical tensor; CheckpointError if one is stored twice or has no scales."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        match = _EXPERTS.fullmatch(name)
        if match is None:
            found[name] = shape
            continue
        path, module, kind = match.groups()
        if kind == "_scales":
            continue
        if kind == "_blocks":
            scales = stored.get(f"{path}.{module}_scales")
            if len(shape) != 4 or shape[3] != 16 or scales != shape[:3]:
                raise CheckpointError(
                    f"{name!r} is {list(shape)} and its scales are {scales}; [E, out, groups, 16] is read"
                )
        sizes = (shape[0], shape[2] * 32, shape[1]) if kind == "_blocks" else shape
        rank = 2 if kind == "_bias" else 3
        modules = _modules(module)
        if len(sizes) != rank or sizes[-1] % len(modules):
            raise CheckpointError(f"tensor {name!r} has shape {list(shape)}; [experts, inputs, outputs] is needed")
        own = (sizes[-1] // len(modules), *sizes[1:-1])
        for expert in range(sizes[0]):
            for one in modules:
                canonical = f"{path}.{expert}.{one}.{'bias' if kind == '_bias' else 'weight'}"
                if canonical in found:
                    raise CheckpointError(f"tensor {canonical!r} is stored twice, the second time in {name!r}")
                found[canonical] = own
    return found


def canonical_tensors(stored: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every tensor under its canonical name, contiguous; blocks wait for their scales."""
    waiting: dict[str, NDArray[Any]] = {}
    for name, values in stored:
        match = _EXPERTS.fullmatch(name)
        if match is None:
            yield name, values
            continue
        path, module, kind = match.groups()
        if kind in ("_blocks", "_scales"):
            other = waiting.pop(f"{path}.{module}", None)
            if other is None:
                waiting[f"{path}.{module}"] = values
                continue
            blocks, scales = (values, other) if kind == "_blocks" else (other, values)
        for expert in range(len(values)):
            if kind == "_bias":
                whole = values[expert]  # [out]
            elif kind is None:
                whole = values[expert].T  # [out, in]
            else:
                whole = dequantize_mxfp4(blocks[expert], scales[expert])
            modules = _modules(module)
            for n, one in enumerate(modules):
                canonical = f"{path}.{expert}.{one}.{'bias' if kind == '_bias' else 'weight'}"
                yield canonical, np.ascontiguousarray(whole[n :: len(modules)])


def dequantize_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[out, groups, 16] bytes and [out, groups] exponents biased by 127 -> [out, groups * 32]; low half-bytes first."""
    values = np.empty((*blocks.shape[:2], 32), np.float32)
    values[..., ::2], values[..., 1::2] = _VALUES[blocks & 15], _VALUES[blocks >> 4]
    return np.ldexp(values, scales[..., None].astype(np.int32) - 127).reshape(len(blocks), -1)


def _modules(module: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if module == "gate_up_proj" else (module,)
