"""Adapters of mixtures of experts on the JAX engine: PEFT's logits, and pages that come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.extra_weights import expert_bytes
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import XlaConfig
from app.engine.errors import AdapterMismatch
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.sharding import shard_columns
from app.engine.models.spec import ModelSpec
from app.engine.xla.backend import XlaBackend
from app.engine.xla.moe_lora_tables import XlaMoeLoraTables, write_pages
from app.engine.xla.sharding import make_mesh
from app.engine.xla.sizes import sizes_of
from tests.engine.adapters.moe_parity import (
    FORMATS,
    edit,
    expected,
    names_of_old,
    per_expert_folder,
    save_random,
    tiny_mixture,
)
from tests.engine.adapters.parity import random_tokens
from tests.engine.adapters.random_adapters import random_mixture_adapter
from tests.engine.served import CONFIG, served_logits
from tests.engine.xla.tiny_backends import counting_compilations, divisible_mixture
from tests.seeds import rng

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's own use
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's, on parameters as targets
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


@pytest.fixture(
    scope="module",
    params=[
        ("mixtral", "xla"),
        pytest.param(("qwen2_moe", "xla"), marks=pytest.mark.nightly),
        pytest.param(("qwen2_moe", "pallas"), marks=pytest.mark.nightly),
        pytest.param(("qwen3_moe", "xla"), marks=pytest.mark.nightly),
        pytest.param(("olmoe", "xla"), marks=pytest.mark.nightly),
        pytest.param(("gpt_oss", "xla"), marks=pytest.mark.nightly),
        ("deepseek_v2", "xla"),
        pytest.param(("deepseek_v2 query latents", "xla"), marks=pytest.mark.nightly),
    ],
    ids="-".join,
)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(transformers' model, our backend) of one family with one kernel backend."""
    family, kernel_backend = request.param
    folder = tmp_path_factory.mktemp("base")
    model = tiny_mixture(family)
    model.save_pretrained(folder)
    checkpoint = load_checkpoint(folder)
    config = CONFIG.on(XlaConfig(kernel_backend=kernel_backend, skip_precompile=True))
    backend = XlaBackend(checkpoint.spec, checkpoint.tensors(), config, make_mesh(jax.devices("cpu"), 1))
    yield model, backend
    backend.close()


def test_every_format_and_one_lora_per_expert_in_one_batch(mixture: Any, tmp_path: Path) -> None:
    model, backend = mixture
    tokens = random_tokens(model)
    adapters, wanted = [], [expected(model, tokens)]
    for index, settings in enumerate(FORMATS.values()):
        folder = tmp_path / str(index)
        save_random(model, folder, settings)
        adapters.append(read_adapter(folder, backend.spec))
        wanted.append(expected(model, tokens, folder))
    names = ["the base", *FORMATS]
    # Dense layers and shared experts have such modules, too; PEFT has no rule for gpt-oss.
    if model.config.model_type not in ("qwen2_moe", "gpt_oss", "deepseek_v2"):
        modules, block = names_of_old(model)
        per_expert_folder(model, tmp_path / "old", modules, block, r=11)
        adapters.append(read_adapter(tmp_path / "old", backend.spec))
        edit(tmp_path / "old", target_modules=list(modules), rank_pattern={})  # as PEFT's rule finds them
        wanted.append(expected(model, tokens, tmp_path / "old"))
        names.append("one per expert")
    together = served_logits(backend, [None, *adapters], tokens)
    for name, found, each in zip(names, together, wanted, strict=True):
        assert each.allows(found), name
    for each in wanted[1:]:
        assert np.abs(each.logits - wanted[0].logits).max() > 0.01, "an adapter that changes nothing shows nothing"
    with counting_compilations() as count:
        alone = served_logits(backend, [adapters[1], *[None] * 7], tokens)[0]
    assert count.num_compiled == 0, "an adapter of experts compiles nothing"
    assert wanted[2].allows(alone)


def books(max_bytes: int, tensor_shards: int = 1) -> tuple[ModelSpec, XlaMoeLoraTables]:
    spec = divisible_mixture()
    return spec, XlaMoeLoraTables(sizes_of(spec, tensor_shards), 4, max_bytes)


def written(rows: XlaMoeLoraTables, adapter_slot: int, adapter: LoraAdapter) -> list[int]:
    """The pages that were written."""
    pages = np.concatenate([numbers for _, numbers in rows.write(adapter_slot, adapter)])
    return [page for page in pages.tolist() if page < rows.num_pages]


def test_an_adapter_pays_for_its_own_experts_and_ranks_and_its_pages_come_back() -> None:
    spec, rows = books(1 << 22)
    adapters = [random_mixture_adapter(spec, rank, rng()) for rank in (4, 20, 20)]
    held = []
    for slot, adapter in enumerate(adapters, 1):
        pages = written(rows, slot, adapter)
        ranks: dict[tuple[int, int], int] = {}
        for (layer, _, expert), pair in adapter.weights.items():
            if expert is not None:
                ranks[layer, expert] = max(ranks.get((layer, expert), 0), pair.rank)
        assert len(pages) == sum(-(-rank // 8) for rank in ranks.values())
        others = adapter.card.extra_bytes - expert_bytes(adapter, spec)
        assert rows.extra_bytes(adapter) == others + len(pages) * rows.page_bytes
        assert not set(pages) & {page for each in held for page in each}, "nobody else's"
        held.append(pages)
    assert rows.longest(np.arange(4, dtype=np.int32)).tolist()[0] == 0
    places = rows.places()
    assert places is not None
    for slot, pages in enumerate(held, 1):
        heads = places.first_pages.reshape(2, 6, 4)[:, :, slot].reshape(-1).tolist()
        found = []
        for page in heads:
            at = page
            while at != rows.num_pages:
                found.append(at)
                at = int(places.next_pages[at])
        assert sorted(found) == sorted(pages)
    for slot in (1, 2, 3):
        rows.release(slot)
    places = rows.places()
    assert places is not None
    assert (places.first_pages == rows.num_pages).all()
    assert not any(ranks.any() for ranks in places.ranks.values())
    assert sorted(rows._free) == list(range(rows.num_pages))


def test_without_room_adapters_of_experts_are_refused_and_others_served() -> None:
    spec, rows = books(100)
    assert rows.num_pages == 0
    assert rows.places() is None
    with pytest.raises(AdapterMismatch, match=r"raise engine\.extra_weights_bytes"):
        rows.check(random_mixture_adapter(spec, 4, rng()))


@pytest.mark.parametrize("tensor_shards", [1, 2])
def test_following_an_experts_pages_gives_its_own_delta_whatever_was_there_before(tensor_shards: int) -> None:
    """Adapters come and go, so lists run through pages of adapters that have left, in any order."""
    generator = rng()
    spec, rows = books(1 << 20, tensor_shards)
    sizes = sizes_of(spec, tensor_shards, 1)
    tables = jax.tree.map(
        lambda shape: np.full(shape, np.nan, np.float32), rows.shapes(rows.num_pages), is_leaf=_is_shape
    )
    resident: dict[int, LoraAdapter] = {}
    for _ in range(12):
        slot = int(generator.integers(1, 4))
        if slot in resident and generator.random() < 0.4:
            rows.release(slot)
            del resident[slot]
        else:
            resident[slot] = random_mixture_adapter(spec, int(generator.integers(1, 30)), generator)
            for part, pages in rows.write(slot, resident[slot]):
                tables = jax.tree.map(np.asarray, write_pages(jax.tree.map(jax.numpy.asarray, tables), part, pages))
        assert sorted([*rows._free, *(page for held in rows._pages_of.values() for page in held)]) == list(
            range(rows.num_pages)
        ), "every page is free, or one adapter's"
    places = rows.places()
    assert places is not None
    heads = places.first_pages.reshape(2, 6, 4)
    num_compared = 0
    for slot, adapter in resident.items():
        for (layer, target, expert), pair in adapter.weights.items():
            if expert is None:
                continue
            module = next(one for one in sizes.modules if target in one.targets and one.num_experts is not None)
            whole = next(one for one in sizes.whole if one.name == module.name)
            index, columns = module.targets.index(target), shard_columns(whole, tensor_shards)[target]
            a, b, page = [], [], int(heads[sizes.stacked_layer("experts_down", layer), expert, slot])
            ranks = [one.rank for key, one in adapter.weights.items() if (key.layer, key.expert) == (layer, expert)]
            for _ in range(-(-max(ranks) // 8)):
                count = int(places.ranks[module.name][page, index])
                a.append(tables.a[target][page * 8 : page * 8 + count])
                b.append(tables.b[target][page * 8 : page * 8 + count])
                page = int(places.next_pages[page])
            assert page == rows.num_pages, "there the list ends"
            is_input = module.kind.split == "input"
            order = np.argsort(columns.reshape(-1))
            found_a, found_b = np.concatenate(a), np.concatenate(b)
            np.testing.assert_array_equal(found_a[:, order] if is_input else found_a, pair.a)
            np.testing.assert_array_equal(found_b if is_input else found_b[:, order], pair.b)
            num_compared += 1
    assert num_compared or not resident


def _is_shape(node: object) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)
