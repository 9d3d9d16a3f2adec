"""Combines several adapters of one base into one: the arithmetic of PEFT's `add_weighted_adapter`.

"cat" is the weighted sum itself: ranks side by side, weights folded into b. "svd" is its best approximation of a given
rank. The other methods combine A with A and B with B, or whole deltas ("_svd"), as PEFT defines them
(`peft.utils.merge_utils`): TIES (Yadav et al. 2023), DARE (Yu et al. 2024), task arithmetic (Ilharco et al. 2023).
Features that have no weighted sum are refused by name. DARE's random drops are seeded by the combination's digest, so
the result is the same on every machine. Text settings belong to registrations, not to contents: the result has none.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import BFLOAT16, LoraAdapter, LoraKey, LoraPair, Matrix, read_only, to_float32
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.combining.combination import Combination, CombinationMethod
from app.engine.adapters.extra_weights import extra_bytes
from app.engine.adapters.features import EMBEDDING_LORA, LM_HEAD_LORA, LORA_BIAS
from app.engine.errors import CombinationError
from app.engine.models.spec import ModelSpec

Floats = NDArray[np.float32]
#: A module: a `LoraKey`, or the name of one outside the layers.
K = TypeVar("K", bound=Hashable)

#: Features that have a weighted sum.
_SUMMED = frozenset({LORA_BIAS, EMBEDDING_LORA, LM_HEAD_LORA})
#: Only "cat", the sum of deltas, can keep lora_bias. PEFT drops it.
_WITHOUT_BIAS = _SUMMED - {LORA_BIAS}
#: Methods whose signs are elected by A's and B's values before they are weighted.
_SIGN_ELECTING = frozenset({"ties", "dare_ties"})


#: Products of a combination by SVD: width times the square of the rank, summed over its modules. For whole deltas the
#: rank is the smaller side. This many take about a minute of one core.
MAX_SVD_PRODUCTS = 2e11


class _WeightedPair(NamedTuple):
    """One part's pair of a module, with its scale (already folded into b) and its weight."""

    pair: LoraPair
    scale: float
    weight: float


def combine(combination: Combination, adapters: Sequence[LoraAdapter], spec: ModelSpec) -> LoraAdapter:
    """The derived adapter. Raises CombinationError, with the name of what cannot be combined."""
    names, method = [part.ref.name for part in combination.parts], combination.method
    for name, adapter in zip(names, adapters, strict=True):
        unsupported = sorted(adapter.features - (_SUMMED if method.name == "cat" else _WITHOUT_BIAS))
        if unsupported:
            raise CombinationError(
                f"adapter {name!r} has {' and '.join(unsupported)}, which {method.name!r} cannot combine; use it alone"
            )
        if method.name in _SIGN_ELECTING:
            _check_votes(name, adapter, method.name)
    parts = list(zip(adapters, (part.weight for part in combination.parts), strict=True))
    rng = np.random.default_rng([method.seed or 0, int(combination.digest[:16], 16)])
    largest = max(pair.rank for one in adapters for pair in (*one.weights.values(), *one.outer.values()))
    combine = _Combiner(method, method.svd_rank or largest, rng)
    weights = combine.all([(adapter.weights, adapter.scales, weight) for adapter, weight in parts])
    outer = combine.all([(adapter.outer, adapter.outer_scales, weight) for adapter, weight in parts])
    biases: dict[LoraKey, Floats] = {}
    for adapter, weight in parts:
        for key, values in adapter.delta_biases.items():
            biases[key] = biases.get(key, np.float32(0)) + np.float32(weight) * values
    derived = LoraAdapter(
        _make_card(combination.digest, adapters, weights, outer, biases),
        MappingProxyType(dict(sorted(weights.items(), key=lambda item: item[0].sort_key))),
        delta_biases=MappingProxyType(biases),
        outer=MappingProxyType(outer),
    )
    if derived.is_zero:
        raise CombinationError(f"{' and '.join(names)} change nothing with these weights; name the base model instead")
    return replace(derived, card=replace(derived.card, extra_bytes=extra_bytes(derived, spec)))


def check_cost(combination: Combination, adapters: Sequence[LoraAdapter], *, max_bytes: int, max_rank: int) -> None:
    """Raise CombinationError for a combination that takes too much memory or time, before anything is computed."""
    method, num_bytes = combination.method.name, sum(adapter.card.size_bytes for adapter in adapters)
    if num_bytes > max_bytes:
        raise CombinationError(
            f"the adapters have {num_bytes} bytes together but adapters.max_adapter_bytes is {max_bytes}; combine fewer"
        )
    shapes: dict[Hashable, tuple[int, int]] = {}
    ranks: dict[Hashable, int] = {}
    for adapter in adapters:
        for key, pair in (*adapter.weights.items(), *adapter.outer.items()):
            shapes[key] = (pair.a.shape[1], pair.b.shape[1])
            ranks[key] = ranks.get(key, 0) + pair.rank
    rank = max(ranks.values(), default=0)
    if method == "cat" and rank > max_rank:
        raise CombinationError(
            f"the ranks add up to {rank} but adapters.max_rank is {max_rank}; combine fewer, or use method 'svd'"
        )
    if not method.endswith("svd"):
        return
    num_products = sum(
        (d_in + d_out) * min(ranks[key] if method == "svd" else d_out, d_in, d_out) ** 2
        for key, (d_in, d_out) in shapes.items()
    )
    if num_products > MAX_SVD_PRODUCTS:
        raise CombinationError(
            f"method {method!r} takes {num_products:.2g} products for these adapters and at most "
            f"{MAX_SVD_PRODUCTS:.2g} are computed here; use 'cat', 'linear', or 'svd' of smaller ranks"
        )


def _check_votes(name: str, adapter: LoraAdapter, method: str) -> None:
    """With a scale of zero, b is zero and has no sign to vote with."""
    for key, scale in (*adapter.scales.items(), *adapter.outer_scales.items()):
        if scale == 0:
            raise CombinationError(
                f"adapter {name!r} has lora_alpha 0 for {_module_name(key)}: its values are zero, yet would get a "
                f"vote with {method!r}; leave the adapter out, or use {method + '_svd'!r}"
            )


class _Combiner:
    """Applies one method to the modules of all parts."""

    def __init__(self, method: CombinationMethod, svd_rank: int, rng: np.random.Generator) -> None:
        self._method = method
        self._svd_rank = svd_rank
        self._rng = rng

    def all(self, parts: Sequence[tuple[Mapping[K, LoraPair], Mapping[K, float], float]]) -> dict[K, LoraPair]:
        """Every module that any part has; a part without it adds nothing."""
        found: dict[K, LoraPair] = {}
        fused = [_keys_by_a(pairs) for pairs, _, _ in parts]
        for key in sorted({key for pairs, _, _ in parts for key in pairs}, key=str):
            if key in found:
                continue
            owners = [(pairs, scales, weight) for pairs, scales, weight in parts if key in pairs]
            slices = [keys[id(pairs[key].a)] for (pairs, _, _), keys in zip(parts, fused, strict=True) if key in pairs]
            if len(set(slices)) > 1:
                raise CombinationError(f"module {_module_name(key)} is saved fused by one adapter and split by another")
            keys = slices[0]  # several for a fused module, which PEFT combines as one module
            whole = [
                _WeightedPair(
                    LoraPair(
                        to_float32(pairs[key].a), np.concatenate([to_float32(pairs[one].b) for one in keys], axis=1)
                    ),
                    scales.get(key, 1.0),
                    weight,
                )
                for pairs, scales, weight in owners
            ]
            a, b = self._pair(whole, _module_name(key))
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise CombinationError(
                    f"module {_module_name(key)}: the combined values leave float32; lower the weights"
                )
            narrow = all(matrix.dtype == BFLOAT16 for pairs, _, _ in owners for one in keys for matrix in pairs[one])
            a = _bfloat16_if_exact(a) if narrow else a
            ends = np.cumsum([owners[0][0][one].b.shape[1] for one in keys])
            for one, part in zip(keys, np.split(b, ends[:-1], axis=1), strict=True):
                own = np.ascontiguousarray(part)
                found[one] = LoraPair(read_only(a), read_only(_bfloat16_if_exact(own) if narrow else own))
        return found

    def _pair(self, parts: Sequence[_WeightedPair], where: str) -> LoraPair:
        name = self._method.name
        if name == "cat":
            return _side_by_side(parts)
        ranks = [part.pair.rank for part in parts]
        if name == "svd":
            return _truncate_svd(_side_by_side(parts), self._svd_rank)
        if name.endswith("_svd"):
            deltas: list[Any] = [part.pair.b.T @ part.pair.a for part in parts]  # [d_out, d_in]
            u, s, vh = np.linalg.svd(self._merge_tensors(deltas, [part.weight for part in parts]), full_matrices=False)
            return LoraPair(vh[: self._svd_rank], (u * s)[:, : self._svd_rank].T)
        if len(set(ranks)) > 1:
            raise CombinationError(f"module {where}: ranks {ranks} differ, and {name!r} needs equal ones; use 'cat'")
        return self._halves(parts)

    def _halves(self, parts: Sequence[_WeightedPair]) -> LoraPair:
        """A with A and B with B, each weighted by sqrt(|weight * scale|); the sign goes to A."""
        factors = [part.weight * part.scale for part in parts]
        roots = [math.sqrt(abs(factor)) for factor in factors]
        a = [part.pair.a for part in parts]
        # b includes the scale; if that is zero, so are b and its factor.
        b: list[Any] = [part.pair.b / np.float32(part.scale or 1.0) for part in parts]
        signed = [math.copysign(root, factor) if factor else 0.0 for root, factor in zip(roots, factors, strict=True)]
        return LoraPair(self._merge_tensors(a, signed), self._merge_tensors([values.T for values in b], roots).T)

    def _merge_tensors(self, tensors: Sequence[Floats], weights: Sequence[float]) -> Floats:
        return merge_tensors(tensors, weights, self._method, self._rng)


def _side_by_side(parts: Sequence[_WeightedPair]) -> LoraPair:
    """The exact sum: [r1 + r2 + ..., d]."""
    a = np.concatenate([part.pair.a for part in parts])
    return LoraPair(a, np.concatenate([np.float32(part.weight) * part.pair.b for part in parts]))


def _truncate_svd(pair: LoraPair, rank: int) -> LoraPair:
    """The best approximation of b.T @ a of at most this rank, by QR of both halves and SVD of the small product."""
    q_b, r_b = np.linalg.qr(pair.b.T)  # [d_out, k], [k, r]
    q_a, r_a = np.linalg.qr(pair.a.T)  # [d_in, k], [k, r]
    u, s, vh = np.linalg.svd(r_b @ r_a.T)
    return LoraPair(vh[:rank] @ q_a.T, ((q_b @ u[:, : len(s)])[:, :rank] * s[:rank]).T)


def _keys_by_a(pairs: Mapping[K, LoraPair]) -> dict[int, tuple[K, ...]]:
    """id of A → the modules that use it: several for a fused module."""
    found: dict[int, tuple[K, ...]] = {}
    for key, pair in pairs.items():
        found[id(pair.a)] = (*found.get(id(pair.a), ()), key)
    return found


def _make_card(
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
    )


def _bfloat16_if_exact(values: Floats) -> Matrix:
    """In bfloat16 if that represents every value."""
    narrow: Matrix = values.astype(BFLOAT16)
    return narrow if np.array_equal(narrow.astype(np.float32), values) else values


def _module_name(key: object) -> str:
    return f"{key.target} of layer {key.layer}" if isinstance(key, LoraKey) else str(key)


def merge_tensors(
    tensors: Sequence[Floats], weights: Sequence[float], method: CombinationMethod, rng: np.random.Generator
) -> Floats:
    """One tensor from N of equal shape, by the method; a "_svd" suffix makes no difference here."""
    name = method.name.removesuffix("_svd")
    if name.startswith("dare"):
        tensors = [prune_random(tensor, method.density or 0.0, rng) for tensor in tensors]
    elif name in ("ties", "magnitude_prune"):
        tensors = [prune_magnitude(tensor, method.density or 0.0) for tensor in tensors]
    stacked = np.stack(tensors)  # [N, ...]
    factors = np.array(weights, np.float32).reshape(-1, *[1] * (stacked.ndim - 1))
    if name.endswith("ties"):
        return _disjoint_merge(stacked, stacked * factors, method.majority_sign or "total")
    summed: Floats = (stacked * factors).sum(axis=0)
    return summed


def prune_magnitude(tensor: Floats, density: float) -> Floats:
    """Keep the largest `density` of the values by magnitude; the others become zero."""
    if density >= 1:
        return tensor
    count = int(density * tensor.size)
    flat, result = tensor.reshape(-1), np.zeros(tensor.size, np.float32)
    if count:
        largest = np.argpartition(-np.abs(flat), count - 1)[:count]
        result[largest] = flat[largest]
    return result.reshape(tensor.shape)


def prune_random(tensor: Floats, density: float, rng: np.random.Generator) -> Floats:
    """Keep each value with probability `density`, divided by it; the others become zero."""
    if density >= 1:
        return tensor
    is_kept = rng.random(tensor.shape) < density
    result: Floats = np.where(is_kept, tensor, np.float32(0))
    return result / np.float32(density) if density > 0 else result


def _disjoint_merge(tensors: Floats, weighted: Floats, majority_sign: str) -> Floats:
    """Per element, the mean of the weighted values that have the majority's sign. Unweighted values vote, as in
    PEFT.
    """
    signs = np.sign(tensors)
    votes = (tensors if majority_sign == "total" else signs).sum(axis=0)
    agrees = signs == np.where(votes >= 0, 1, -1)  # [N, ...]
    mean: Floats = (weighted * agrees).sum(axis=0) / np.maximum(agrees.sum(axis=0), 1).astype(np.float32)
    return mean
