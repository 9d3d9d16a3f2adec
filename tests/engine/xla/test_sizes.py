"""What a device computes of a model: together they compute each column once; what does not divide is told."""

from __future__ import annotations

from collections import Counter

import pytest

from app.engine.errors import ConfigError
from app.engine.models.linear_modules import LATENT_B, layer_linear_modules
from app.engine.models.sharding import shard_columns
from app.engine.models.spec import ModelSpec
from app.engine.xla.sizes import sizes_of
from tests.engine.adapters.random_adapters import tiny_spec
from tests.engine.batch_invariance import latent_spec, mixture_spec, sinks_spec
from tests.engine.xla.test_tensor_parallel import spec as eight_heads
from tests.engine.xla.tiny_backends import divisible_mixture

#: (model, tensor shards, expert shards)
DIVIDED = [
    (tiny_spec(), 1, 1),
    (tiny_spec(), 4, 1),
    (eight_heads(), 8, 1),
    (divisible_mixture(), 2, 3),
    (sinks_spec(), 1, 2),
    (latent_spec(), 1, 3),
]


@pytest.mark.parametrize(("spec", "tensor", "expert"), DIVIDED)
def test_devices_together_compute_every_column(spec: ModelSpec, tensor: int, expert: int) -> None:
    sizes = sizes_of(spec, tensor, expert)
    for whole, mine in zip(sizes.whole, sizes.modules, strict=True):
        if mine.kind is LATENT_B:
            continue
        shards = sizes.shards_of(mine)
        assert shards == (tensor if mine.num_experts is not None else tensor * expert)
        for target, width, own in zip(whole.targets, whole.widths, mine.widths, strict=True):
            columns = shard_columns(whole, shards)[target]
            seen = Counter(columns.reshape(-1).tolist())
            size = width if mine.kind.split == "output" else whole.d_in
            assert sorted(seen) == list(range(size)), "each is somebody's"
            assert len(set(seen.values())) == 1, "KV heads that several hold are held equally often"
            assert own == (columns.shape[1] if mine.kind.split == "output" else width)
        assert sizes.total_width(mine) == sum(mine.widths) * (shards if mine.kind.split == "output" else 1)
    assert sizes.vocab_per_shard * sizes.num_shards >= spec.vocab_size
    assert (sizes.vocab_per_shard - 1) * sizes.num_shards < spec.vocab_size


@pytest.mark.parametrize("spec", [tiny_spec(), mixture_spec(), sinks_spec(), latent_spec()])
def test_a_layer_has_the_products_that_the_model_says_each_at_a_place_of_its_own(spec: ModelSpec) -> None:
    sizes = sizes_of(spec, 1)
    for module in sizes.modules:
        layers = sizes.layers_of(module.name)
        assert [sizes.stacked_layer(module.name, layer) for layer in layers] == list(range(len(layers)))
    for layer in range(sizes.num_layers):
        expected = {module.name: module for module in layer_linear_modules(spec, layer)}
        found = {one.name: one for one in sizes.modules if layer in sizes.layers_of(one.name)}
        assert found.keys() == expected.keys()
        for name, module in expected.items():
            assert (found[name].d_in, found[name].widths, found[name].num_experts) == (
                module.d_in, module.widths, module.num_experts,
            )  # fmt: skip
    assert sizes.layers_of("no such product") == ()
    with pytest.raises(ValueError, match="not in tuple"):
        sizes.stacked_layer("gate_up", 99)


def test_experts_are_divided_by_both_settings_and_all_else_by_their_product() -> None:
    sizes = sizes_of(divisible_mixture(), 2, 3)
    up = next(module for module in sizes.modules if module.name == "experts_gate_up")
    assert (sizes.num_shards, sizes.experts_per_shard, sizes.group_size(up)) == (6, 2, 2)
    assert up.num_experts == 6, "which of them are a device's is said by where they lie"
    assert sizes_of(tiny_spec(), 2).experts_per_shard == 0
    latents = sizes_of(latent_spec(), 1, 3)
    assert {module.name for module in latents.absorbed} & {module.name for module in latents.with_weights}
    for module in latents.absorbed:
        assert latents.group_size(module) == latents.attention.num_heads // 3
        assert latents.layers_of(module.name) == tuple(range(latents.num_layers)), "attention is in every layer"
    assert LATENT_B not in {module.kind for module in latents.with_weights}, "heads' parts stand for it"


def test_a_kv_head_is_held_by_several_where_there_are_fewer_than_devices() -> None:
    assert [sizes_of(eight_heads(), shards).kv_heads for shards in (1, 2, 4, 8)] == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("spec", "tensor", "expert", "message"),
    [
        (tiny_spec(), 1, 2, r"engine\.xla\.expert_parallel is 2 but tiny has no experts; set 1"),
        (mixture_spec(), 1, 4, r"engine\.xla\.expert_parallel 4 does not divide .*: layers have 6 experts"),
        (tiny_spec(), 3, 1, r"engine\.xla\.tensor_parallel 3 does not divide tiny: q_proj falls into 4 parts"),
        (mixture_spec(), 7, 3, r"engine\.xla\.tensor_parallel times expert_parallel, 21 does not divide"),
    ],
)
def test_what_does_not_divide_is_told_with_the_setting_that_says_so(
    spec: ModelSpec, tensor: int, expert: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes_of(spec, tensor, expert)
