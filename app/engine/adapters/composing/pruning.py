"""How PEFT's combination types drop and merge values (`peft.utils.merge_utils`), in NumPy.

In: one module's tensors, one of each adapter, and their weights. Out: one tensor. Sources: TIES (Yadav et al. 2023),
DARE (Yu et al. 2024), task arithmetic (Ilharco et al. 2023). Rule: what is dropped at random is drawn from a generator
that is given, so that the same composition is the same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.composing.composition import Recipe

Floats = NDArray[np.float32]


def merged(tensors: Sequence[Floats], weights: Sequence[float], recipe: Recipe, rng: np.random.Generator) -> Floats:
    """One tensor of N equal shapes, by the recipe's method; "_svd" at its end changes nothing here."""
    method = recipe.method.removesuffix("_svd")
    if method.startswith("dare"):
        tensors = [randomly_pruned(tensor, recipe.density or 0.0, rng) for tensor in tensors]
    elif method in ("ties", "magnitude_prune"):
        tensors = [pruned(tensor, recipe.density or 0.0) for tensor in tensors]
    stacked = np.stack(tensors)  # [N, ...]
    factors = np.array(weights, np.float32).reshape(-1, *[1] * (stacked.ndim - 1))
    if method.endswith("ties"):
        return _disjoint(stacked, stacked * factors, recipe.majority_sign or "total")
    summed: Floats = (stacked * factors).sum(axis=0)
    return summed


def pruned(tensor: Floats, density: float) -> Floats:
    """The largest `density` of the values by magnitude; zeros in place of the others."""
    if density >= 1:
        return tensor
    count = int(density * tensor.size)
    flat, kept = tensor.reshape(-1), np.zeros(tensor.size, np.float32)
    if count:
        largest = np.argpartition(-np.abs(flat), count - 1)[:count]
        kept[largest] = flat[largest]
    return kept.reshape(tensor.shape)


def randomly_pruned(tensor: Floats, density: float, rng: np.random.Generator) -> Floats:
    """Each value with probability `density`, divided by it; zeros in place of the others."""
    if density >= 1:
        return tensor
    keeps = rng.random(tensor.shape) < density
    kept: Floats = np.where(keeps, tensor, np.float32(0))
    return kept / np.float32(density) if density > 0 else kept


def _disjoint(tensors: Floats, weighted: Floats, majority_sign: str) -> Floats:
    """Per place the mean of those weighted values whose sign is the majority's. PEFT elects it before the weights."""
    signs = np.sign(tensors)
    votes = (tensors if majority_sign == "total" else signs).sum(axis=0)
    agrees = signs == np.where(votes >= 0, 1, -1)  # [N, ...]
    mean: Floats = (weighted * agrees).sum(axis=0) / np.maximum(agrees.sum(axis=0), 1).astype(np.float32)
    return mean
