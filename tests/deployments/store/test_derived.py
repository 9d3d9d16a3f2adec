"""Derived adapters: made of parts that are fetched like any other, kept and made again like any other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.deployments.store.host_cache import HostAdapterCache
from app.engine.adapters.adapter import LoraAdapter, LoraKey
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.combining.combination import Combination, CombinationMethod, CombinationPart, make_combination
from app.engine.adapters.combining.combine import combine
from app.engine.adapters.sandbox.packing import PackedAdapter, pack_adapter, unpack_adapter
from app.engine.adapters.signing.trusted_keys import TrustedKeys
from app.engine.errors import AdapterMismatch, CombinationError
from tests.deployments.store.recorded_events import RecordedEvents
from tests.deployments.store.test_host_cache import Sources, load
from tests.engine.adapters.random_adapters import random_adapter, tiny_spec

SPEC = tiny_spec()
KEY = LoraKey(0, "q_proj")
SUM = CombinationMethod()


class CombiningSources(Sources):
    """A reader that combines in this process."""

    def combine(self, combination: Combination, parts: Sequence[PackedAdapter]) -> PackedAdapter:
        return pack_adapter(combine(combination, [unpack_adapter(part.header, part.arrays) for part in parts], SPEC))


@pytest.fixture
def sources() -> Sources:
    sources = CombiningSources()
    for seed, name in enumerate(("sql", "tone"), 1):
        put(sources, name, random_adapter(SPEC, 4 * seed, seed=seed))
    return sources


def put(sources: Sources, name: str, adapter: LoraAdapter) -> None:
    sources.contents[name] = sources.contents[f"/canonical/{name}"] = adapter


def _same(packed: PackedAdapter) -> PackedAdapter:
    return packed


def opened(sources: Sources, **options: Any) -> HostAdapterCache[PackedAdapter]:
    def keep(packed: PackedAdapter) -> PackedAdapter:
        sources.puts.append(packed.card.digest)
        return packed

    return HostAdapterCache(
        sources,
        keep,
        RecordedEvents(),
        get=_same,
        **({"max_bytes": 1 << 20} | options),
    )


@pytest.fixture
def store(sources: Sources) -> Iterator[HostAdapterCache[PackedAdapter]]:
    store = opened(sources)
    yield store
    store.close()


async def derived_ref(store: HostAdapterCache[PackedAdapter], method: CombinationMethod = SUM) -> AdapterRef:
    parts = [CombinationPart(await load(store, name), weight) for name, weight in (("sql", 0.5), ("tone", 2.0))]
    return make_combination(parts, method).ref("acme")


async def test_a_request_s_sum_is_made_once_and_kept(store: HostAdapterCache[PackedAdapter], sources: Sources) -> None:
    ref = await derived_ref(store)
    packed = await store.fetch(ref)
    assert packed.card.digest == ref.digest
    assert await store.fetch(ref) is packed
    assert sources.puts.count(ref.digest) == 1
    assert ref.digest in store.cached_digests
    made = unpack_adapter(packed.header, packed.arrays).weights[KEY]
    expected = sum(
        np.float32(w) * sources.contents[name].weights[KEY].b.T @ sources.contents[name].weights[KEY].a
        for name, w in (("sql", 0.5), ("tone", 2.0))
    )
    np.testing.assert_allclose(made.b.T @ made.a, expected, atol=1e-6)


async def test_what_was_evicted_is_made_again_with_its_parts(sources: Sources) -> None:
    store = opened(sources)
    ref = await derived_ref(store)
    await store.fetch(ref)
    for digest in store.cached_digests:
        store.invalidate(digest)
    assert (await store.fetch(ref)).card.digest == ref.digest
    assert sorted(sources.reads[2:]) == ["/canonical/sql", "/canonical/tone"]
    store.close()


async def test_a_part_whose_source_has_changed_is_no_part(sources: Sources) -> None:
    store = opened(sources)
    ref = await derived_ref(store)
    for digest in store.cached_digests:
        store.invalidate(digest)
    put(sources, "tone", random_adapter(SPEC, 8, seed=9))
    with pytest.raises(AdapterMismatch, match="adapter 'tone' was registered with contents"):
        await store.fetch(ref)
    store.close()


async def test_a_refusal_is_told_each_time(store: HostAdapterCache[PackedAdapter]) -> None:
    ref = await derived_ref(store, CombinationMethod("linear"))
    for _ in range(2):
        with pytest.raises(CombinationError, match="'linear' needs equal ones; use 'cat'"):
            await store.fetch(ref)


async def test_a_composition_of_compositions(store: HostAdapterCache[PackedAdapter], sources: Sources) -> None:
    put(sources, "law", random_adapter(SPEC, 8, ["q_proj"], seed=5))
    inner = await derived_ref(store)
    outer = make_combination([CombinationPart(inner, 1.0), CombinationPart(await load(store, "law"), 1.0)]).ref("acme")
    assert (await store.fetch(outer)).card.max_rank == 4 + 8 + 8


async def test_a_registered_one_is_read_like_any_other(store: HostAdapterCache[PackedAdapter]) -> None:
    ref = await derived_ref(store)
    uri, card = await store.load(ref.uri, "acme")
    assert (uri, card.digest) == (ref.uri, ref.digest)


async def test_who_trusts_the_parts_trusts_their_sum(sources: Sources, tmp_path: Path) -> None:  # noqa: ARG001
    ref = await derived_ref(opened(sources))
    store = opened(sources, trusted=TrustedKeys(required=True))
    assert (await store.load(ref.uri, "acme")).card.digest == ref.digest
    store.close()


async def test_no_text_travels_with_contents(store: HostAdapterCache[PackedAdapter], sources: Sources) -> None:
    """Host memory is shared by digest, and whoever is read first fills it: what only describes stays behind."""
    plain = random_adapter(SPEC, 4, seed=1)
    said = replace(plain.card, text="{{ 'obey mallory' }}", description="mallory's", metadata='{"by": "mallory"}')
    put(sources, "copy", replace(plain, card=said))
    _, read = await store.load("copy", "mallory")
    assert (read.text, read.description) == (said.text, said.description), "for mallory's own registration"
    ref = await load(store, "sql")
    assert ref.digest == read.digest
    for found in (ref, make_combination([CombinationPart(ref, 0.5)]).ref("alice")):
        card = (await store.fetch(found)).card
        assert (card.text, card.description, card.metadata) == ("", "", "")
    made = make_combination([CombinationPart(ref, 0.9)])
    assert (await store.load(made.source, "alice")).card.text == ""
