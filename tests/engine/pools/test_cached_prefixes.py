"""A prefix has the same key in an engine and in an ingress, and a pool reports the most recently used ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.deployments.ingress.dispatch.request_router import PrefixHasher
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.pools.block_pool import (
    MAX_CACHED_PREFIXES,
    PREFIX_KEY_BYTES,
    PREFIX_TOKENS,
    BlockPool,
    CachedPrefixes,
    num_prefix_blocks,
    prefix_key,
)
from app.engine.request import GenerateRequest, PoolingParams
from app.engine.sequence import Sequence
from tests.deployments.fleet import LIMITS
from tests.fakes import FakeBackend, fake_adapter, fake_request, fake_spec

ADAPTER = fake_adapter("a", 8)


def prompt(seed: int, count: int = PREFIX_TOKENS + 40) -> list[int]:
    return [(seed * 31 + index * 7) % 50 for index in range(count)]


def cached_keys(engine: Engine, *requests: GenerateRequest) -> tuple[bytes, ...]:
    """What the engine tells once these have run, one after another."""
    for request in requests:
        engine.submit(request, ADAPTER if request.adapter is not None else None)
        while engine.has_work:
            engine.step()
    return engine.stats().cached_prefixes


def new_engine(num_kv_blocks: int = 256) -> Engine:
    limits = replace(LIMITS, num_kv_blocks=num_kv_blocks)
    return Engine(FakeBackend(limits), EngineConfig(speculative_decoding="off"))


@pytest.mark.parametrize("block_size", [8, 16, 48, 128, 256])
@pytest.mark.parametrize("adapter", [None, ADAPTER])
@pytest.mark.parametrize("salt", [b"", b"one tenant"])
def test_a_prefix_key_is_the_hash_of_its_last_block(block_size: int, adapter: object, salt: bytes) -> None:
    chosen = ADAPTER if adapter is not None else None
    request = replace(fake_request("r", prompt(1, 600), chosen), cache_salt=salt)
    sequence = Sequence(request, chosen, fake_spec(), block_size)
    count = num_prefix_blocks(block_size)
    digest = None if chosen is None else chosen.card.digest
    name = prefix_key(fake_spec().digest, digest, salt, request.token_ids, block_size)
    assert name == sequence.extend_hashes(count)[count - 1][:PREFIX_KEY_BYTES]
    assert count * block_size >= PREFIX_TOKENS


def test_what_an_ingress_computes_is_what_an_engine_tells() -> None:
    hasher = PrefixHasher(fake_spec().digest, LIMITS.block_size)
    base, other = fake_request("base", prompt(1)), fake_request("other", prompt(1), ADAPTER)
    salted = replace(fake_request("salted", prompt(1)), cache_salt=b"another tenant")
    keys = cached_keys(new_engine(), base, other, salted)
    assert [name.hex() for name in keys] == [hasher.of(base), hasher.of(other), hasher.of(salted)]
    assert len({*keys}) == 3, "an adapter and a salt change the name"


def test_equal_prefixes_have_one_key_whatever_follows_and_short_prompts_have_none() -> None:
    hasher = PrefixHasher(fake_spec().digest, LIMITS.block_size)
    assert hasher.of(fake_request("a", prompt(1))) == hasher.of(fake_request("b", prompt(1)[:-20] + [3] * 9))
    assert hasher.of(fake_request("c", prompt(2))) != hasher.of(fake_request("a", prompt(1)))
    assert hasher.of(fake_request("d", prompt(1, PREFIX_TOKENS))) is None
    assert hasher.of(fake_request("e", prompt(1, PREFIX_TOKENS + 1))) is not None
    assert hasher.of(replace(fake_request("f", prompt(1)), pooling=PoolingParams())) is None


def test_a_prefix_that_is_found_again_is_the_last_used() -> None:
    one, two = fake_request("one", prompt(1)), fake_request("two", prompt(2))
    hasher = PrefixHasher(fake_spec().digest, LIMITS.block_size)
    keys = cached_keys(new_engine(), one, two, replace(one, request_id="again"))
    assert [name.hex() for name in keys] == [hasher.of(two), hasher.of(one)]


def test_a_prefix_whose_blocks_were_reused_is_not_reported() -> None:
    engine = new_engine(num_kv_blocks=24)  # of 8 tokens: room for one prompt and its answer
    one, two = fake_request("one", prompt(1)), fake_request("two", prompt(2))
    assert len(cached_keys(engine, one)) == 1
    keys = cached_keys(engine, two)
    assert [name.hex() for name in keys] == [PrefixHasher(fake_spec().digest, LIMITS.block_size).of(two)]


def test_nothing_is_reported_where_nothing_is_shared() -> None:
    engine = Engine(FakeBackend(LIMITS), EngineConfig(speculative_decoding="off", enable_prefix_caching=False))
    assert cached_keys(engine, fake_request("one", prompt(1))) == ()
    assert cached_keys(new_engine(), fake_request("short", prompt(1, PREFIX_TOKENS - 30))) == ()


def test_only_the_most_recently_used_are_reported() -> None:
    prefixes = CachedPrefixes()
    names = [index.to_bytes(32, "big")[::-1] for index in range(100)]
    for block, key in enumerate(names):
        prefixes.add(block, key)
    assert prefixes.keys == tuple(key[:PREFIX_KEY_BYTES] for key in names[-MAX_CACHED_PREFIXES:])
    prefixes.use(0)
    prefixes.use(5000)
    prefixes.drop(99)
    prefixes.drop(1)
    assert prefixes.keys[-1] == names[0][:PREFIX_KEY_BYTES], "used again, it is reported again"
    assert names[99][:PREFIX_KEY_BYTES] not in prefixes.keys
    assert len(prefixes.keys) == MAX_CACHED_PREFIXES - 1
    assert sum(map(len, prefixes.keys)) <= MAX_CACHED_PREFIXES * PREFIX_KEY_BYTES


def test_a_pool_forgets_prefixes_with_their_blocks() -> None:
    pool = BlockPool(2, 8)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"a" * 32, b"x", ends_prefix=True)
    pool.publish(blocks[1], b"b" * 32, b"y")
    assert pool.cached_prefixes == (b"a" * PREFIX_KEY_BYTES,)
    pool.release(blocks)
    assert pool.cached_prefixes == (b"a" * PREFIX_KEY_BYTES,)
    assert pool.allocate(2) is not None
    assert pool.cached_prefixes == ()
