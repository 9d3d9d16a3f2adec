"""Several adapters made into one, as the engine takes it: the arithmetic of PEFT's `add_weighted_adapter`.

In: adapters on one base, in the order of a `Combination`'s parts. Out: one `LoraAdapter` with the composition's digest.
"cat" is the weighted sum itself: ranks side by side, weights folded into b. "svd" is its best approximation of a given
rank. The other methods combine A with A and B with B, or whole deltas ("_svd"), and are defined by PEFT alone
(`peft.utils.merge_utils`): TIES (Yadav et al. 2023), DARE (Yu et al. 2024), task arithmetic (Ilharco et al. 2023). What
an adapter does beyond low-rank deltas and has no weighted sum is refused by name. Values that are dropped at random are
drawn from a given generator, so the same composition is the same numbers on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import BFLOAT16, LoraAdapter, LoraKey, LoraPair, Matrix, widened
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.combining.combination import Combination, CombinationMethod
from app.engine.adapters.extra_weights import extra_bytes
from app.engine.errors import CombinationError
from app.engine.models.spec import ModelSpec

Floats = NDArray[np.float32]
#: A module: a `LoraKey`, or the name of one outside the layers.
K = TypeVar("K", bound=Hashable)

#: Features with a weighted sum: they are linear in what they add.
_SUMMED = frozenset({"lora_bias", "embedding LoRA", "lm_head LoRA"})
#: Lora_bias is added with the delta: only a sum of deltas has it. PEFT drops it.
_WITHOUT_BIAS = _SUMMED - {"lora_bias"}
#: They let A's and B's values elect a sign before they weigh them by what the scale makes of them.
_ELECTING = frozenset({"ties", "dare_ties"})


class _Weighted(NamedTuple):
    """One part's pair of a module: its scale, which b holds already, and its weight."""

    pair: LoraPair
    scale: float
    weight: float


def combine(composition: Combination, adapters: Sequence[LoraAdapter], spec: ModelSpec) -> LoraAdapter:
    """The derived adapter. Raises CombinationError for what cannot be combined, by name."""
    names, recipe = [part.ref.name for part in composition.parts], composition.recipe
    for name, adapter in zip(names, adapters, strict=True):
        beyond = sorted(adapter.features - (_SUMMED if recipe.method == "cat" else _WITHOUT_BIAS))
        if beyond:
            raise CombinationError(
                f"adapter {name!r} has {' and '.join(beyond)}, of which {recipe.method!r} makes no sum; use it alone"
            )
        if recipe.method in _ELECTING:
            _check_votes(name, adapter, recipe.method)
    if len({adapter.card.text for adapter in adapters}) > 1:
        raise CombinationError(
            f"adapters {', '.join(names)} write prompts differently: their chat templates or special tokens are not "
            "the same; combine adapters with the same"
        )
    parts = list(zip(adapters, (part.weight for part in composition.parts), strict=True))
    rng = np.random.default_rng([recipe.seed or 0, int(composition.digest[:16], 16)])
    largest = max(pair.rank for one in adapters for pair in (*one.weights.values(), *one.outer.values()))
    combine = _Combiner(recipe, recipe.svd_rank or largest, rng)
    weights = combine.all([(adapter.weights, adapter.scales, weight) for adapter, weight in parts])
    outer = combine.all([(adapter.outer, adapter.outer_scales, weight) for adapter, weight in parts])
    biases: dict[LoraKey, Floats] = {}
    for adapter, weight in parts:
        for key, values in adapter.delta_biases.items():
            biases[key] = biases.get(key, np.float32(0)) + np.float32(weight) * values
    derived = LoraAdapter(
        _card(composition.digest, adapters, weights, outer, biases),
        MappingProxyType(dict(sorted(weights.items(), key=lambda item: _order(item[0])))),
        delta_biases=MappingProxyType(biases),
        outer=MappingProxyType(outer),
    )
    return replace(derived, card=replace(derived.card, extra_bytes=extra_bytes(derived, spec)))


def _check_votes(name: str, adapter: LoraAdapter, method: str) -> None:
    """Of a scale of zero b has nothing left to elect a sign with."""
    for key, scale in (*adapter.scales.items(), *adapter.outer_scales.items()):
        if scale == 0:
            raise CombinationError(
                f"adapter {name!r} has lora_alpha 0 for {_said(key)}, which says nothing and yet has a vote with "
                f"{method!r}; leave the adapter out, or use {method + '_svd'!r}"
            )


class _Combiner:
    """One recipe over the modules of all parts."""

    def __init__(self, recipe: CombinationMethod, svd_rank: int, rng: np.random.Generator) -> None:
        self._recipe = recipe
        self._svd_rank = svd_rank
        self._rng = rng

    def all(self, parts: Sequence[tuple[Mapping[K, LoraPair], Mapping[K, float], float]]) -> dict[K, LoraPair]:
        """Every module that any part has; parts without it add nothing to it."""
        found: dict[K, LoraPair] = {}
        fused = [_fused(pairs) for pairs, _, _ in parts]
        for key in sorted({key for pairs, _, _ in parts for key in pairs}, key=str):
            if key in found:
                continue
            having = [(pairs, scales, weight) for pairs, scales, weight in parts if key in pairs]
            slices = [keys[id(pairs[key].a)] for (pairs, _, _), keys in zip(parts, fused, strict=True) if key in pairs]
            if len(set(slices)) > 1:
                raise CombinationError(f"module {_said(key)} is saved fused by one adapter and split by another")
            keys = slices[0]  # of a fused module, which PEFT combines as the one module that it is
            whole = [
                _Weighted(
                    LoraPair(widened(pairs[key].a), np.concatenate([widened(pairs[one].b) for one in keys], axis=1)),
                    scales.get(key, 1.0),
                    weight,
                )
                for pairs, scales, weight in having
            ]
            a, b = self._pair(whole, _said(key))
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise CombinationError(f"module {_said(key)}: the combined values leave float32; lower the weights")
            narrow = all(matrix.dtype == BFLOAT16 for pairs, _, _ in having for one in keys for matrix in pairs[one])
            a = _narrowed(a) if narrow else a
            ends = np.cumsum([having[0][0][one].b.shape[1] for one in keys])
            for one, part in zip(keys, np.split(b, ends[:-1], axis=1), strict=True):
                own = np.ascontiguousarray(part)
                found[one] = LoraPair(_read_only(a), _read_only(_narrowed(own) if narrow else own))
        return found

    def _pair(self, parts: Sequence[_Weighted], where: str) -> LoraPair:
        method = self._recipe.method
        if method == "cat":
            return _side_by_side(parts)
        ranks = [part.pair.rank for part in parts]
        if method == "svd":
            return _truncated(_side_by_side(parts), self._svd_rank)
        if method.endswith("_svd"):
            deltas: list[Any] = [part.pair.b.T @ part.pair.a for part in parts]  # [d_out, d_in]
            u, s, vh = np.linalg.svd(self._merged(deltas, [part.weight for part in parts]), full_matrices=False)
            return LoraPair(vh[: self._svd_rank], (u * s)[:, : self._svd_rank].T)
        if len(set(ranks)) > 1:
            raise CombinationError(f"module {where}: ranks {ranks} differ, and {method!r} needs equal ones; use 'cat'")
        return self._halves(parts)

    def _halves(self, parts: Sequence[_Weighted]) -> LoraPair:
        """A with A and B with B, each weighted by the root of |weight * scale|; a sign goes to A."""
        factors = [part.weight * part.scale for part in parts]
        roots = [math.sqrt(abs(factor)) for factor in factors]
        a = [part.pair.a for part in parts]
        # b holds the scale; one of zero has left nothing, and its factor is zero too.
        b: list[Any] = [part.pair.b / np.float32(part.scale or 1.0) for part in parts]
        signed = [math.copysign(root, factor) if factor else 0.0 for root, factor in zip(roots, factors, strict=True)]
        return LoraPair(self._merged(a, signed), self._merged([values.T for values in b], roots).T)

    def _merged(self, tensors: Sequence[Floats], weights: Sequence[float]) -> Floats:
        return merged(tensors, weights, self._recipe, self._rng)


def _side_by_side(parts: Sequence[_Weighted]) -> LoraPair:
    """[r1 + r2 + ..., d]: the exact sum."""
    a = np.concatenate([part.pair.a for part in parts])
    return LoraPair(a, np.concatenate([np.float32(part.weight) * part.pair.b for part in parts]))


def _truncated(pair: LoraPair, rank: int) -> LoraPair:
    """The best approximation of b.T @ a of at most this rank, without the product: SVD of what two QRs leave."""
    q_b, r_b = np.linalg.qr(pair.b.T)  # [d_out, k], [k, r]
    q_a, r_a = np.linalg.qr(pair.a.T)  # [d_in, k], [k, r]
    u, s, vh = np.linalg.svd(r_b @ r_a.T)
    return LoraPair(vh[:rank] @ q_a.T, ((q_b @ u[:, : len(s)])[:, :rank] * s[:rank]).T)


def _fused(pairs: Mapping[K, LoraPair]) -> dict[int, tuple[K, ...]]:
    """Of each A, by its id, the modules that have it: several of a fused one."""
    found: dict[int, tuple[K, ...]] = {}
    for key, pair in pairs.items():
        found[id(pair.a)] = (*found.get(id(pair.a), ()), key)
    return found


def _card(
    digest: str,
    adapters: Sequence[LoraAdapter],
    weights: Mapping[LoraKey, LoraPair],
    outer: Mapping[str, LoraPair],
    biases: Mapping[LoraKey, Floats],
) -> AdapterCard:
    arrays = [array for pair in (*weights.values(), *outer.values()) for array in pair] + list(biases.values())
    return AdapterCard(
        digest=digest,
        base_digest=adapters[0].card.base_digest,
        max_rank=max((pair.rank for key, pair in weights.items() if key.expert is None), default=1),
        targets=tuple(sorted({key.target for key in weights} | set(outer))),
        dtype=",".join(sorted({adapter.card.dtype for adapter in adapters})),
        size_bytes=sum({id(array): array.nbytes for array in arrays}.values()),
        text=adapters[0].card.text,
    )


def _narrowed(values: Floats) -> Matrix:
    """In bfloat16 if that holds every value."""
    narrow: Matrix = values.astype(BFLOAT16)
    return narrow if np.array_equal(narrow.astype(np.float32), values) else values


def _read_only(values: Matrix) -> Matrix:
    values.setflags(write=False)
    return values


def _order(key: LoraKey) -> tuple[int, str, int]:
    return key.layer, key.target, -1 if key.expert is None else key.expert


def _said(key: object) -> str:
    return f"{key.target} of layer {key.layer}" if isinstance(key, LoraKey) else str(key)


def merged(
    tensors: Sequence[Floats], weights: Sequence[float], recipe: CombinationMethod, rng: np.random.Generator
) -> Floats:
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
