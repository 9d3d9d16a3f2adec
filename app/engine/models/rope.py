"""Inverse frequencies and tables of rotary embeddings, with every scaling variant applied ahead of time.

The parameters are transformers 5's `rope_parameters`, or the older `rope_theta` and `rope_scaling` merged into one
mapping. Variants whose frequencies depend on the sequence's length (dynamic, longrope) cannot be one table and are
refused. Formulas: Su et al. 2021 (default), Chen et al. 2023 (linear), Meta's Llama 3.1 (llama3), Peng et al. 2023
(yarn); each in the form transformers computes it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import CheckpointError
from app.engine.models.spec import ModelSpec, RopeSpec

_YARN = "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(_YARN.split()),
}
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_INERT_KEYS = {
    "linear": frozenset({"original_max_position_embeddings"}),
    "default": frozenset({"factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"finetuned"}),
}


class RopeTables(NamedTuple):
    """cos and sin [ropes, positions, rotary / 2] of a model, float32; layer_rope: [L], which one a layer uses."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    layer_rope: NDArray[np.int64]


def rope_spec(parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeSpec:
    """The table for `parameters`; CheckpointError names a variant or key that is not supported."""
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        raise CheckpointError(
            f"rope_type {rope_type!r} is not supported: its frequencies depend on the sequence; "
            f"supported are {', '.join(_KEYS)}"
        )
    present = {key for key, value in parameters.items() if value is not None}
    unknown = present - _KEYS[rope_type] - _COMMON_KEYS - _INERT_KEYS.get(rope_type, frozenset())
    if unknown:
        raise CheckpointError(f"rope parameter {min(unknown)!r} is not understood with rope_type {rope_type!r}")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        value = parameters["partial_rotary_factor"]
        raise CheckpointError(f"partial_rotary_factor {value} is not supported; the whole head must be rotated (1.0)")
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
    theta = _number(parameters, "rope_theta", 10_000.0)
    plain = default_inv_freq(theta, head_dim)
    if rope_type == "linear":
        return _spec(plain / np.float32(_number(parameters, "factor")))
    if rope_type == "llama3":
        return _spec(_llama3(plain, parameters, max_positions))
    if rope_type == "yarn":
        return _yarn(theta, head_dim, parameters, max_positions)
    return _spec(plain)


def rope_tables(spec: ModelSpec, max_positions: int) -> RopeTables:
    """One table for each rope of the model; angles in float32 as transformers computes them."""
    layer_ropes = [layer.attention.rope for layer in spec.layers]
    ropes = list(dict.fromkeys(layer_ropes))
    positions = np.arange(max_positions, dtype=np.float32)
    angles = [positions[:, None] * np.array(rope.inv_freq, np.float32) for rope in ropes]
    factors = [np.float32(rope.attention_factor) for rope in ropes]
    return RopeTables(
        cos=np.stack([np.cos(a) * factor for a, factor in zip(angles, factors, strict=True)]),
        sin=np.stack([np.sin(a) * factor for a, factor in zip(angles, factors, strict=True)]),
        layer_rope=np.array([ropes.index(rope) for rope in layer_ropes], np.int64),
    )


def default_inv_freq(theta: float, head_dim: int) -> NDArray[np.float32]:
    """theta ** -(2i / head_dim) for i < head_dim/2, as [head_dim/2] float32."""
    return np.float32(1.0) / _pos_freqs(theta, head_dim)


def _pos_freqs(theta: float, head_dim: int) -> NDArray[np.float32]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)


def _llama3(plain: NDArray[np.float32], parameters: Mapping[str, Any], max_positions: int) -> NDArray[np.float32]:
    factor = np.float32(_number(parameters, "factor"))
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if high <= low:
        raise CheckpointError(f"high_freq_factor {high} must exceed low_freq_factor {low}")
    old_context = _number(parameters, "original_max_position_embeddings", max_positions)
    wavelen = np.float32(2 * math.pi) / plain
    scaled = np.where(wavelen > old_context / low, plain / factor, plain)
    smooth = (np.float32(old_context) / wavelen - np.float32(low)) / np.float32(high - low)
    smoothed = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelen < old_context / high) & ~(wavelen > old_context / low)
    return np.where(medium, smoothed, scaled).astype(np.float32)


def _yarn(theta: float, head_dim: int, parameters: Mapping[str, Any], max_positions: int) -> RopeSpec:
    old_context = _number(parameters, "original_max_position_embeddings", max_positions)
    factor = _number(parameters, "factor", max_positions / old_context)
    if parameters.get("attention_factor") is not None:
        attention_factor = _number(parameters, "attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        scales = _number(parameters, "mscale"), _number(parameters, "mscale_all_dim")
        attention_factor = yarn_mscale(factor, scales[0]) / yarn_mscale(factor, scales[1])
    else:
        attention_factor = yarn_mscale(factor, 1.0)
    rotations = (_number(parameters, "beta_fast", 32), _number(parameters, "beta_slow", 1))
    try:
        low, high = (head_dim * math.log(old_context / (r * 2 * math.pi)) / (2 * math.log(theta)) for r in rotations)
    except (ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"rope_theta {theta} and rotations {rotations} give no range of frequencies") from error
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"rope parameter 'truncate' is {truncate!r}; true or false is needed")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against a division by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    pos_freqs = _pos_freqs(theta, head_dim)
    interpolated, extrapolated = np.float32(1) / (np.float32(factor) * pos_freqs), np.float32(1) / pos_freqs
    return _spec(interpolated * (np.float32(1) - keep) + extrapolated * keep, float(attention_factor))


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much yarn sharpens attention (Peng et al. 2023), times a model's own `mscale`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _spec(inv_freq: NDArray[np.float32], attention_factor: float = 1.0) -> RopeSpec:
    if not np.isfinite(inv_freq).all():
        raise CheckpointError("the rope parameters give frequencies that are not finite")
    return RopeSpec(tuple(float(f) for f in inv_freq), attention_factor)


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"rope parameter {key!r} is {value!r}; a positive number is needed")
    return float(value)
