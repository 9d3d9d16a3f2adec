"""Resident adapters: what is written of one is its own, shard by shard, and a step is told what its slots have."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.engine.adapters.adapter import LoraAdapter
from app.engine.errors import AdapterMismatch
from app.engine.models.linear_modules import DENSE_TARGETS
from app.engine.models.sharding import shard_columns
from app.engine.models.spec import ModelSpec
from app.engine.xla.adapters import XlaAdapters, base_tables, rank_classes, write_rows
from app.engine.xla.sharding import make_mesh
from app.engine.xla.sizes import XlaSizes, sizes_of
from app.engine.xla.weights import read_weights
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.random_adapters import random_adapter, random_mixture_adapter, random_tensors, tiny_spec
from tests.engine.batch_invariance import mixture_spec
from tests.pairwise import pairwise
from tests.seeds import rng

NUM_SLOTS, NUM_ROWS = 5, 64


def made(spec: ModelSpec, shards: int = 1, extra_bytes: int = 0) -> tuple[XlaSizes, XlaAdapters]:
    sizes = sizes_of(spec, shards)
    weights = read_weights(sizes, random_tensors(spec, 3), 16)
    mesh = make_mesh(jax.devices("cpu"), 1)
    weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
    return sizes, XlaAdapters(sizes, weights, NUM_SLOTS, NUM_ROWS, extra_bytes, mesh)


@pairwise({"shards": [1, 2, 4], "rank, num_rows": [(1, 8), (8, 8), (11, 16)]})
def test_the_shards_rows_give_the_adapters_own_delta(shards: int, rank: int, num_rows: int) -> None:
    spec = tiny_spec()
    sizes, adapters = made(spec, shards)
    adapter = random_adapter(spec, rank, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], dtype="BF16")
    rows = adapters.rows_of(adapter, num_rows)
    generator = rng()
    for whole, module in zip(sizes.whole, sizes.modules, strict=True):
        is_output = module.kind.split == "output"
        for target in module.targets:
            mine = shard_columns(whole, shards)[target]
            for layer in range(2):
                pair = adapter.weights.get((layer, target, None))  # type: ignore[call-overload]
                x = generator.normal(size=whole.d_in)
                found = np.zeros(whole.widths[whole.targets.index(target)])
                for shard in range(shards):
                    a = np.split(rows.a[target], 1 if is_output else shards, axis=2)[0 if is_output else shard][layer]
                    b = np.split(rows.b[target], shards if is_output else 1, axis=2)[shard if is_output else 0][layer]
                    own = b[:rank].T @ (a[:rank] @ (x if is_output else x[mine[shard]]))
                    if is_output:
                        found[mine[shard]] = own
                    else:
                        found += own
                if pair is None:
                    assert not rows.a[target].any()
                    assert not rows.b[target].any()
                else:
                    expected = pair.b.astype(np.float64).T @ (pair.a.astype(np.float64) @ x)
                    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_is_told_of_the_adapters_that_its_slots_have_now() -> None:
    """Random adapters come to random slots and leave; a step says what the last one of each slot is."""
    spec, generator = tiny_spec(), rng()
    _, adapters = made(spec)
    resident: dict[int, tuple[int, LoraAdapter]] = {}
    for _ in range(40):
        slot = int(generator.integers(1, NUM_SLOTS))
        if generator.random() < 0.3:
            adapters.release(slot)
            resident.pop(slot, None)
        else:
            targets = generator.choice(DENSE_TARGETS, int(generator.integers(1, 8)), replace=False).tolist()
            adapter, start = random_adapter(spec, int(generator.integers(1, 17)), targets), 16 * (slot - 1)
            adapters.assign(slot, start, adapter)
            resident[slot] = (start, adapter)
        places = adapters.places()
        for mine, (start, adapter) in resident.items():
            assert int(places.starts[mine]) == start
            for module in adapters._sizes.single:
                for layer, (index, target) in itertools.product(range(2), enumerate(module.targets)):
                    pair = adapter.weights.get((layer, target, None))  # type: ignore[call-overload]
                    assert int(places.ranks[module.name][layer, mine, index]) == (0 if pair is None else pair.rank)
        counts = {each: int(generator.integers(1, 5)) for each in (0, *sorted(resident))}
        pieces = [Piece(np.zeros(count, np.int32), 0, np.arange(4), each) for each, count in counts.items()]
        step = adapters.of_step(forward_batch(pieces, 16))
        assert step.widest == max((adapter.card.max_rank for _, adapter in resident.values()), default=0)
        expected = [NUM_ROWS // 8] * counts.pop(0)  # the base's
        for each, count in counts.items():
            expected += [resident[each][0] // 8] * count
        assert step.extra_rows.tolist() == expected
        assert (step.num_extra_tokens, step.most_pages) == (0, 0)
        assert not step.expert_slots.any()


def test_programs_get_the_same_places_until_a_slot_changes() -> None:
    _, adapters = made(tiny_spec())
    first = adapters.places()
    assert adapters.places() is first
    adapters.assign(2, 8, random_adapter(tiny_spec(), 4))
    second = adapters.places()
    assert second is not first
    assert (int(first.starts[2]), int(second.starts[2])) == (0, 8), "what a program was given does not change"
    adapters.release(2)
    assert adapters.places() is not second


@pytest.mark.parametrize("start", [0, 24, 48])
def test_rows_are_written_where_they_belong_and_the_base_keeps_its_own(start: int) -> None:
    spec = tiny_spec()
    _, adapters = made(spec, extra_bytes=1 << 20)
    adapter = random_adapter(spec, 13)
    biases = {key: np.full(pair.b.shape[1], 2.0, np.float32) for key, pair in adapter.weights.items()}
    adapter = dataclasses.replace(adapter, delta_biases=biases)
    adapters.prepare(adapter)
    before = base_tables(adapters.table_shapes())
    after = write_rows(
        jax.tree.map(jnp.asarray, before), jax.tree.map(jnp.asarray, adapters.rows_of(adapter, 16)), jnp.int32(start)
    )
    for target in DENSE_TARGETS:
        for table in (after.a[target], after.b[target]):
            is_written = np.asarray(table).any(axis=(0, 2))
            assert np.flatnonzero(is_written).tolist() == list(range(start, start + 13))
    for name, table in after.shifts.items():
        is_written = np.asarray(table).any(axis=(0, 2))
        assert np.flatnonzero(is_written).tolist() == [start // 8], name
        assert (np.asarray(table)[:, start // 8] == 2).all()
    for table in after.scales.values():
        assert (np.asarray(table) == 1).all()
        assert table.shape[1] == NUM_ROWS // 8 + 1, "the last is the base's"


def test_an_adapter_for_modules_that_are_not_here_is_refused() -> None:
    spec = tiny_spec()
    _, adapters = made(spec)
    mixture = random_mixture_adapter(mixture_spec(), 4, np.random.default_rng(1))
    with pytest.raises(AdapterMismatch, match=r"no module '.*' \(expert \d\) in layer \d"):
        adapters.prepare(dataclasses.replace(
            mixture, weights={key: pair for key, pair in mixture.weights.items() if key.expert is not None}
        ))  # fmt: skip
    deep = random_adapter(tiny_spec(3), 4, ["q_proj"])
    with pytest.raises(AdapterMismatch, match=r"no module 'q_proj' \(expert None\) in layer 2"):
        adapters.prepare(deep)


def test_classes_of_ranks_are_the_runs_that_the_engine_hands_out() -> None:
    assert rank_classes(100) == [8, 16, 32, 64]
    assert rank_classes(8) == [8]
    assert rank_classes(7) == []
