"""MoE routing in plain JAX: each token's experts, its rows sorted by expert, and the weighted sum afterwards.

Every array's shape follows from the step's number of tokens, whatever the routing. The lower expert wins ties. With
experts on several devices each device has the pairs of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from app.engine.models.spec import RouterSpec
from app.kernels.sgmv.xla import SEGMENT_TOKENS


class Pairs(NamedTuple):
    """T tokens with K experts each, P = T * K pairs; this device's pairs come first.

    topk_weights: [T, K]. tokens: [P], the token of each sorted pair. places: [T, K], each pair's place in that order.
    mine: [T, K], whether its expert is on this device. starts: [E + 1], first pair of each of this device's experts.
    keys: [P], expert * adapter slots + adapter slot, ascending; E * adapter slots and more for pairs of other devices.
    """

    topk_weights: Array
    tokens: Array
    places: Array
    mine: Array
    starts: Array
    keys: Array


def route(logits: Array, router: RouterSpec) -> tuple[Array, Array]:
    """Each token's experts and their weights, [T, K], the largest weight first. logits: [T, E]."""
    probs = jax.nn.softmax(logits, axis=1)
    if router.top_groups < router.num_groups:
        groups = probs.reshape(len(probs), router.num_groups, -1)
        _, best = lax.top_k(groups.max(axis=2), router.top_groups)
        is_chosen = jax.nn.one_hot(best, router.num_groups).sum(axis=1)  # [T, groups]
        probs = (groups * is_chosen[:, :, None]).reshape(probs.shape)
    chosen, experts = lax.top_k(probs, router.top_k)
    if router.normalised:
        chosen = chosen / chosen.sum(axis=1, keepdims=True)
    return experts, chosen * router.scale


def sort_pairs(
    experts: Array, topk_weights: Array, first: Array, count: int, adapter_slots: Array, num_slots: int,
    num_tokens: Array,
) -> Pairs:  # fmt: skip
    """The pairs of the `count` experts from `first` on, sorted by expert, then by adapter slot, then by token.

    adapter_slots: [T]. Tokens beyond the first `num_tokens` have no pairs.
    """
    total, top_k = experts.shape
    local = experts - first
    mine = (local >= 0) & (local < count) & (jnp.arange(total)[:, None] < num_tokens)
    keys = (jnp.where(mine, local, count) * num_slots + adapter_slots[:, None]).astype(jnp.int32).reshape(-1)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    ordered = keys[order]
    bounds = jnp.arange(count + 1, dtype=jnp.int32) * num_slots
    starts = jnp.searchsorted(ordered, bounds).astype(jnp.int32)
    return Pairs(topk_weights, order // top_k, places.reshape(total, top_k), mine, starts, ordered)


class PageRuns(NamedTuple):
    """Runs of up to `SEGMENT_TOKENS` pairs of one expert and one adapter that changes it; num_runs are real, int32.

    bounds: [P, 2], first and end pair. pages: [P], the adapter's first page of the expert.
    """

    bounds: Array
    pages: Array
    num_runs: Array


def page_runs(keys: Array, first_pages: Array, no_page: int) -> PageRuns:
    """Cut sorted pairs into runs. keys: `Pairs.keys`. first_pages: [E * adapter slots] by key, `no_page` where an
    adapter has none.
    """
    row = jnp.arange(len(keys), dtype=jnp.int32)
    pages = jnp.where(keys < len(first_pages), first_pages[jnp.minimum(keys, len(first_pages) - 1)], no_page)
    first, end = (jnp.searchsorted(keys, keys, side=side).astype(jnp.int32) for side in ("left", "right"))
    begins = (pages != no_page) & ((row - first) % SEGMENT_TOKENS == 0)
    (at,) = jnp.nonzero(begins, size=len(keys), fill_value=0)
    bounds = jnp.stack([row[at], jnp.minimum(row + SEGMENT_TOKENS, end)[at]], axis=1)
    return PageRuns(bounds, pages[at], begins.sum(dtype=jnp.int32))


def combine(outputs: Array, pairs: Pairs) -> Array:
    """Weighted sum [T, H] of each token's outputs of this device's experts. outputs: [P, H], by sorted pair."""
    total = jnp.zeros((len(pairs.topk_weights), outputs.shape[1]), jnp.float32)
    for k in range(pairs.topk_weights.shape[1]):  # one after the other: [T, K, H] would be K times as much memory
        mine = outputs[pairs.places[:, k]]
        total = total + jnp.where(pairs.mine[:, k, None], pairs.topk_weights[:, k, None] * mine, 0)
    return total
