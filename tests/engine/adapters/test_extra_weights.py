"""An adapter's extra weights: with them applied, every module is what PEFT's formula makes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair
from app.engine.adapters.extra_weights import MODULE_KINDS, ExtraWeight, extra_bytes, extra_weights
from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import EMBEDDING, LAYER_NORMS, LM_HEAD
from app.kernels.dora.reference import dora_scale
from tests import seeds
from tests.engine.adapters.random_adapters import (
    module_path,
    random_adapter,
    random_tensors,
    tiny_spec,
    with_random_extras,
)

Floats = NDArray[np.float32]


def biased_spec() -> ModelSpec:
    spec = tiny_spec()
    layer = spec.layers[0]
    attention = replace(layer.attention, qkv_bias=True, qk_norm=True)
    return replace(spec, layers=(replace(layer, attention=attention, mlp=replace(layer.mlp, bias=True)),) * 2)


class Base:
    """A base's weights by name."""

    def __init__(self, spec: ModelSpec) -> None:
        self.tensors = dict(random_tensors(spec))

    def weight(self, key: LoraKey) -> Floats:
        return self.tensors[f"{module_path(*key[:2])}.weight"]

    def dora_scale(self, key: LoraKey, magnitude: Floats, pair: LoraPair) -> Floats:
        return dora_scale(magnitude, self.weight(key), *pair)

    def bias(self, key: LoraKey) -> Floats | None:
        return self.tensors.get(f"{module_path(*key[:2])}.bias")


def by_place(parts: tuple[ExtraWeight, ...]) -> dict[tuple[int, str], dict[str, NDArray[Any]]]:
    """(layer, target) -> kind -> values; the model's under (-1, "")."""
    found: dict[tuple[int, str], dict[str, NDArray[Any]]] = defaultdict(dict)
    for part in parts:
        place = (-1 if part.layer is None else part.layer, part.target or "")
        assert part.kind not in found[place], "one array of a kind in one place"
        found[place][part.kind] = part.values
    return found


def pefts_module(adapter: LoraAdapter, base: Base, key: LoraKey, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """One module's output by PEFT's formula, which knows nothing of scales and shifts."""
    weight = adapter.replaced.get(f"{module_path(*key[:2])}.weight", base.weight(key)).astype(np.float64)
    delta = np.zeros_like(weight)
    if key in adapter.weights:
        a, b = adapter.weights[key]
        delta = b.T.astype(np.float64) @ a.astype(np.float64)
    y = (weight + delta) @ x + adapter.delta_biases.get(key, np.float32(0))
    if key in adapter.magnitudes:
        y *= adapter.magnitudes[key] / np.linalg.norm(weight + delta, axis=1)
    bias = adapter.replaced.get(f"{module_path(*key[:2])}.bias", base.bias(key))
    return y if bias is None else y + bias


def planned_module(
    parts: Mapping[str, NDArray[Any]], adapter: LoraAdapter, base: Base, key: LoraKey, x: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The same by what a device does: the base's product, bias and delta, then the parts."""
    y = base.weight(key).astype(np.float64) @ x
    bias = base.bias(key)
    y = y if bias is None else y + bias
    if key in adapter.weights:
        a, b = adapter.weights[key]
        y += b.T.astype(np.float64) @ (a.astype(np.float64) @ x)
    if "weight" in parts:
        y = parts["weight"].astype(np.float64) @ x
    return y * parts.get("scale", np.float32(1)) + parts.get("shift", np.float32(0))


@pytest.mark.parametrize("spec", [tiny_spec(), biased_spec()], ids=["plain", "biases and norms"])
def test_every_module_is_pefts(spec: ModelSpec) -> None:
    rng = seeds.rng()
    base, kinds = Base(spec), set()
    for _ in range(40):
        adapter = with_random_extras(random_adapter(spec, 3, ["q_proj", "up_proj", "down_proj"]), spec, rng)
        places = by_place(extra_weights(adapter, spec, base))
        for layer in range(len(spec.layers)):
            for product in layer_linear_modules(spec, layer):
                for target in product.targets:
                    key, x = LoraKey(layer, target), rng.normal(0, 1, product.d_in)
                    parts = places.get((layer, target), {})
                    found = planned_module(parts, adapter, base, key, x)
                    np.testing.assert_allclose(found, pefts_module(adapter, base, key, x), rtol=0, atol=1e-4)
                    kinds |= parts.keys()
    assert kinds == set(MODULE_KINDS)


def test_norms_and_matrices_of_tokens_are_the_adapters_own() -> None:
    spec, rng = biased_spec(), seeds.rng()
    base, kinds = Base(spec), set()
    for _ in range(100):
        adapter = with_random_extras(random_adapter(spec, 3, ["q_proj"]), spec, rng)
        places = by_place(extra_weights(adapter, spec, base))
        model = places[-1, ""]
        kinds |= model.keys()
        for layer in range(len(spec.layers)):
            names = {kind: f"model.layers.{layer}.{path}.weight" for kind, path in LAYER_NORMS.items()}
            own = {kind: adapter.replaced[name] for kind, name in names.items() if name in adapter.replaced}
            assert {kind: values.tolist() for kind, values in places.get((layer, ""), {}).items()} == {
                kind: values.tolist() for kind, values in own.items()
            }
        np.testing.assert_array_equal(_embedding(model, spec, base), _pefts_embedding(adapter, spec, base))
        x = rng.normal(0, 1, spec.hidden_size)
        np.testing.assert_allclose(_logits(model, spec, base, x), _pefts_logits(adapter, spec, base, x), atol=1e-5)
    assert kinds == {
        *("final_norm", "embed_rows", "embed_ids", "embed_a", "embed_b"),
        *("head_weight", "head_rows", "head_ids", "head_a", "head_b"),
    }


def test_plain_lora_has_no_extras() -> None:
    adapter = random_adapter(tiny_spec(), 3)
    assert extra_weights(adapter, tiny_spec(), Base(tiny_spec())) == ()
    assert extra_bytes(adapter, tiny_spec()) == 0


def test_bytes_are_those_of_the_parts_in_whole_panels() -> None:
    spec = tiny_spec()
    adapter = replace(
        random_adapter(spec, 3, ["q_proj"]),
        replaced={"model.layers.0.mlp.up_proj.weight": np.ones((40, 24), np.float32), EMBEDDING: _ones(64, 24)},
        outer={"lm_head": LoraPair(_ones(5, 24), _ones(5, 64))},
        delta_biases={LoraKey(1, "q_proj"): _ones(32)},
    )
    assert extra_bytes(adapter, spec) == 4 * (48 * 24 + 64 * 24 + 16 * 24 + 5 * 64 + 32)


def _ones(*shape: int) -> Floats:
    return np.ones(shape, np.float32)


def _embedding(model: Mapping[str, NDArray[Any]], spec: ModelSpec, base: Base) -> Floats:
    table = base.tensors[EMBEDDING].copy()
    if "embed_rows" in model:
        table[model.get("embed_ids", slice(None))] = model["embed_rows"]
    if "embed_a" in model:
        assert model["embed_a"].shape == (spec.vocab_size, len(model["embed_b"]))
        table += model["embed_a"] @ model["embed_b"]
    return table


def _pefts_embedding(adapter: LoraAdapter, spec: ModelSpec, base: Base) -> Floats:
    table = adapter.replaced.get(EMBEDDING, base.tensors[EMBEDDING]).copy()
    if "embed_tokens" in adapter.token_rows:
        token_ids, rows = adapter.token_rows["embed_tokens"]
        table[list(token_ids)] = rows
    if "embed_tokens" in adapter.outer:
        a, b = adapter.outer["embed_tokens"]
        table += a.T @ b
    assert table.shape == (spec.vocab_size, spec.hidden_size)
    return table


def _logits(
    model: Mapping[str, NDArray[Any]], spec: ModelSpec, base: Base, x: NDArray[np.float64]
) -> NDArray[np.float64]:
    logits: NDArray[np.float64] = model.get("head_weight", base.tensors[EMBEDDING]).astype(np.float64) @ x
    if "head_ids" in model:
        assert (np.diff(model["head_ids"]) > 0).all()
        logits[model["head_ids"]] = model["head_rows"].astype(np.float64) @ x
    if "head_a" in model:
        logits += model["head_b"].T.astype(np.float64) @ (model["head_a"].astype(np.float64) @ x)
    assert logits.shape == (spec.vocab_size,)
    return logits


def _pefts_logits(adapter: LoraAdapter, spec: ModelSpec, base: Base, x: NDArray[np.float64]) -> NDArray[np.float64]:
    head = adapter.replaced.get(LM_HEAD, base.tensors[EMBEDDING]).astype(np.float64)
    if "lm_head" in adapter.token_rows:
        token_ids, rows = adapter.token_rows["lm_head"]
        head = head.copy()
        head[list(token_ids)] = rows
    if "lm_head" in adapter.outer:
        a, b = adapter.outer["lm_head"]
        head = head + b.T.astype(np.float64) @ a.astype(np.float64)
    logits: NDArray[np.float64] = head @ x
    assert spec.tie_embeddings
    return logits
