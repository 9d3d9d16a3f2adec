"""The table of linear modules, against the tensors a checkpoint has and against an addition by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.engine.errors import CheckpointError
from app.engine.models.linear_modules import layer_linear_modules, linear_module_of, stacked_modules, targets_of
from app.engine.models.spec import AttentionSpec, MlpSpec, RopeSpec
from app.engine.models.weight_names import expected_tensors
from tests.engine.adapters.random_adapters import tiny_spec

SPEC = tiny_spec()  # hidden 24, q 32, k and v 16, feed-forward 40


def test_every_linear_tensor_of_a_checkpoint_has_its_place_and_shape_in_the_table() -> None:
    layer = SPEC.layers[0]
    biased = replace(layer, attention=replace(layer.attention, qkv_bias=True), mlp=replace(layer.mlp, bias=True))
    spec = replace(SPEC, layers=(layer, biased))
    found: dict[str, tuple[int, ...]] = {}
    for index in range(2):
        for product in layer_linear_modules(spec, index):
            for target, width in zip(product.targets, product.widths, strict=True):
                path = f"model.layers.{index}.{product.kind.path(target)}"
                found[f"{path}.weight"] = (width, product.d_in)
                if product.has_bias:
                    found[f"{path}.bias"] = (width,)
    norms = ("norm.weight", "layernorm.weight", "embed_tokens.weight")
    assert found == {name: shape for name, shape in expected_tensors(spec).items() if not name.endswith(norms)}


def test_targets_begin_where_the_ones_before_them_end() -> None:
    qkv, o, gate_up, down = layer_linear_modules(SPEC, 0)
    assert [product.name for product in (qkv, o, gate_up, down)] == ["qkv", "o", "gate_up", "down"]
    assert (qkv.starts(), qkv.width(), qkv.columns("v_proj")) == ((0, 32, 48), 64, slice(48, 64))
    assert (o.starts(), o.width(), gate_up.starts(), down.width()) == ((0,), 24, (0, 40), 24)
    assert (qkv.d_in, o.d_in, gate_up.d_in, down.d_in) == (24, 32, 24, 40)


def test_targets_are_rounded_up_one_by_one() -> None:
    gate_up, down = layer_linear_modules(SPEC, 0)[2:]
    assert (gate_up.padded_widths(16), gate_up.starts(16), gate_up.width(16)) == ((48, 48), (0, 48), 96)
    assert gate_up.columns("up_proj", 16) == slice(48, 88)
    assert (down.width(16), down.columns("down_proj", 16)) == (32, slice(0, 24))


def test_a_target_is_counted_in_the_order_of_products() -> None:
    products = layer_linear_modules(SPEC, 1)
    assert targets_of(products) == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert linear_module_of(products, "up_proj") == products[2]
    with pytest.raises(KeyError, match="router"):
        linear_module_of(products, "router")
    with pytest.raises(ValueError, match="not in tuple"):
        products[0].columns("o_proj")


def test_layers_may_differ_in_positions_and_in_nothing_else() -> None:
    layer = SPEC.layers[0]
    moved = replace(layer.attention, rope=RopeSpec((1.0,) * 4), window=7, scale=0.5)
    stacked = stacked_modules(replace(SPEC, layers=(layer, replace(layer, attention=moved))))
    assert tuple(module for module, _ in stacked) == layer_linear_modules(SPEC, 0)
    others = (
        replace(layer, mlp=MlpSpec(48)),
        replace(layer, mlp=MlpSpec(40, "gelu_tanh")),
        replace(layer, attention=replace(layer.attention, qk_norm=True)),
        replace(layer, attention=AttentionSpec(2, 2, 16, 8**-0.5, layer.attention.rope)),
    )
    for other in others:
        with pytest.raises(CheckpointError, match="layer 1 of tiny differs from layer 0"):
            stacked_modules(replace(SPEC, layers=(layer, other)))
