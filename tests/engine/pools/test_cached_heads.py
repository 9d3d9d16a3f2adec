"""The name of a prompt's head is the same in an engine and in an ingress, and a pool tells a few of those it has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.deployments.ingress.dispatch.request_router import PrefixHasher
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.pools.block_pool import (
    HEAD_BYTES,
    HEAD_TOKENS,
    MAX_HEADS,
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


def prompt(seed: int, count: int = HEAD_TOKENS + 40) -> list[int]:
    return [(seed * 31 + index * 7) % 50 for index in range(count)]


def heads_of(engine: Engine, *requests: GenerateRequest) -> tuple[bytes, ...]:
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
def test_a_head_is_named_as_the_engine_names_its_blocks(block_size: int, adapter: object, salt: bytes) -> None:
    chosen = ADAPTER if adapter is not None else None
    request = replace(fake_request("r", prompt(1, 600), chosen), cache_salt=salt)
    sequence = Sequence(request, chosen, fake_spec(), block_size)
    count = num_prefix_blocks(block_size)
    digest = None if chosen is None else chosen.card.digest
    name = prefix_key(fake_spec().digest, digest, salt, request.token_ids, block_size)
    assert name == sequence.extend_hashes(count)[count - 1][:HEAD_BYTES]
    assert count * block_size >= HEAD_TOKENS


def test_what_an_ingress_computes_is_what_an_engine_tells() -> None:
    heads = PrefixHasher(fake_spec().digest, LIMITS.block_size)
    base, other = fake_request("base", prompt(1)), fake_request("other", prompt(1), ADAPTER)
    salted = replace(fake_request("salted", prompt(1)), cache_salt=b"another tenant")
    told = heads_of(new_engine(), base, other, salted)
    assert [name.hex() for name in told] == [heads.of(base), heads.of(other), heads.of(salted)]
    assert len({*told}) == 3, "an adapter and a salt change the name"


def test_equal_heads_have_one_name_whatever_follows_and_short_prompts_have_none() -> None:
    heads = PrefixHasher(fake_spec().digest, LIMITS.block_size)
    assert heads.of(fake_request("a", prompt(1))) == heads.of(fake_request("b", prompt(1)[:-20] + [3] * 9))
    assert heads.of(fake_request("c", prompt(2))) != heads.of(fake_request("a", prompt(1)))
    assert heads.of(fake_request("d", prompt(1, HEAD_TOKENS))) is None
    assert heads.of(fake_request("e", prompt(1, HEAD_TOKENS + 1))) is not None
    assert heads.of(replace(fake_request("f", prompt(1)), pooling=PoolingParams())) is None


def test_a_head_that_is_found_again_is_the_last_used() -> None:
    one, two = fake_request("one", prompt(1)), fake_request("two", prompt(2))
    heads = PrefixHasher(fake_spec().digest, LIMITS.block_size)
    told = heads_of(new_engine(), one, two, replace(one, request_id="again"))
    assert [name.hex() for name in told] == [heads.of(two), heads.of(one)]


def test_a_head_whose_blocks_hold_something_else_is_told_no_more() -> None:
    engine = new_engine(num_kv_blocks=24)  # of 8 tokens: room for one prompt and its answer
    one, two = fake_request("one", prompt(1)), fake_request("two", prompt(2))
    assert len(heads_of(engine, one)) == 1
    told = heads_of(engine, two)
    assert [name.hex() for name in told] == [PrefixHasher(fake_spec().digest, LIMITS.block_size).of(two)]


def test_nothing_is_told_where_nothing_is_shared() -> None:
    engine = Engine(FakeBackend(LIMITS), EngineConfig(speculative_decoding="off", enable_prefix_caching=False))
    assert heads_of(engine, fake_request("one", prompt(1))) == ()
    assert heads_of(new_engine(), fake_request("short", prompt(1, HEAD_TOKENS - 30))) == ()


def test_only_so_many_are_told_those_that_were_used_last() -> None:
    heads = CachedPrefixes()
    names = [index.to_bytes(32, "big")[::-1] for index in range(100)]
    for block, key in enumerate(names):
        heads.add(block, key)
    assert heads.told == tuple(key[:HEAD_BYTES] for key in names[-MAX_HEADS:])
    heads.use(0)
    heads.use(5000)
    heads.drop(99)
    heads.drop(1)
    assert heads.told[-1] == names[0][:HEAD_BYTES], "used again, it is told again"
    assert names[99][:HEAD_BYTES] not in heads.told
    assert len(heads.told) == MAX_HEADS - 1
    assert sum(map(len, heads.told)) <= MAX_HEADS * HEAD_BYTES


def test_a_pool_forgets_heads_with_their_blocks() -> None:
    pool = BlockPool(2, 8)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"a" * 32, b"x", is_head=True)
    pool.publish(blocks[1], b"b" * 32, b"y")
    assert pool.cached_prefixes == (b"a" * HEAD_BYTES,)
    pool.release(blocks)
    assert pool.cached_prefixes == (b"a" * HEAD_BYTES,)
    assert pool.allocate(2) is not None
    assert pool.cached_prefixes == ()
