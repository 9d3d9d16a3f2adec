"""Blocks: every one accounted for, prefixes found only where they belong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.pools.block_pool import BlockPool, block_hash, root_hash
from tests.budgets import examples

_text = st.text(max_size=6)
_root_fields = st.tuples(_text, st.one_of(st.none(), _text), st.binary(max_size=6))


@given(_root_fields, _root_fields)
def test_roots_are_equal_only_for_equal_fields(
    one: tuple[str, str | None, bytes], two: tuple[str, str | None, bytes]
) -> None:
    assert (root_hash(*one) == root_hash(*two)) == (one == two)


@given(st.text(max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_moving_characters_between_fields_changes_the_root(text: str, i: int, j: int) -> None:
    def fields(cut: int, end: int) -> tuple[str, str, bytes]:
        return text[:cut], text[cut:end], text[end:].encode()

    one, two = fields(min(i, j), max(i, j)), fields(min(j, 3), max(j, 3))
    assert (root_hash(*one) == root_hash(*two)) == (one == two)


def test_an_absent_adapter_is_no_adapter_name() -> None:
    roots = {root_hash("b", name, b"") for name in (None, "", "base", "lora", "\0")}
    assert len(roots) == 5


def chain(tokens: list[bytes]) -> list[bytes]:
    hashes = [root_hash("b", None, b"")]
    for block in tokens:
        hashes.append(block_hash(hashes[-1], block))
    return hashes[1:]


def test_a_hit_must_match_the_token_ids() -> None:
    pool = BlockPool(4, 8)
    blocks = pool.allocate(2)
    assert blocks is not None
    hashes = chain([b"one", b"two"])
    pool.publish(blocks[0], hashes[0], b"one")
    pool.publish(blocks[1], hashes[1], b"two")
    assert pool.find(hashes, [b"one", b"two"].__getitem__) == blocks
    assert pool.find(hashes, [b"one", b"forged"].__getitem__) == blocks[:1]
    assert pool.find(hashes, [b"forged", b"two"].__getitem__) == []


def test_prefixes_outlive_their_sequence_and_the_tail_goes_first() -> None:
    pool = BlockPool(4, 8)
    held = pool.allocate(3)
    assert held is not None
    tokens = [b"a", b"b", b"c"]
    hashes = chain(tokens)
    for block, key, text in zip(held[:2], hashes, tokens, strict=False):
        pool.publish(block, key, text)
    pool.release(held)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    first_two = pool.allocate(2)  # the unpublished ones
    assert first_two is not None
    assert not set(first_two) & set(held[:2])
    third = pool.allocate(1)
    assert third == [held[1]]
    assert pool.find(hashes, tokens.__getitem__) == held[:1]
    pool.reference(held[:1])
    assert pool.allocate(1) is None
    pool.check()


def test_unused_blocks_are_handed_out_from_the_lowest_on_and_the_others_stay() -> None:
    pool = BlockPool(8, 8)
    held = pool.allocate(7)
    assert held is not None
    pool.publish(held[1], chain([b"a"])[0], b"a")
    for block in (held[4], held[1], held[0], held[5], held[2]):
        pool.release([block])
    assert pool.used_blocks() == [held[1], held[3], held[6]]
    pool.check()
    assert pool.allocate(6) == [held[0], held[2], held[4], held[5], 7, held[1]], "the cached one last"
    assert pool.used_blocks() == list(range(8))


def test_nothing_is_found_when_sharing_is_off() -> None:
    pool = BlockPool(2, 8, share=False)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], chain([b"a"])[0], b"a")
    assert pool.find(chain([b"a"]), [b"a"].__getitem__) == []


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 12), st.data())
def test_every_block_is_accounted_for(num_blocks: int, data: st.DataObject) -> None:
    """Random holders that find, allocate, publish and leave: contents never change under a reference."""
    pool = BlockPool(num_blocks, 8)
    contents: list[list[bytes] | None] = [None] * num_blocks  # what "the device" holds: the whole prefix
    holders: list[tuple[list[int], list[bytes]]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if holders and data.draw(st.booleans()):
            blocks, _tokens = holders.pop(data.draw(st.integers(0, len(holders) - 1)))
            pool.release(blocks)
        else:
            tokens = data.draw(st.lists(st.sampled_from([b"x", b"y"]), min_size=1, max_size=5))
            hashes = chain(tokens)
            found = pool.find(hashes, tokens.__getitem__)
            for index, block in enumerate(found):
                assert contents[block] == tokens[: index + 1]
            if pool.num_free_without(found) < len(tokens) - len(found):
                continue
            pool.reference(found)
            new = pool.allocate(len(tokens) - len(found))
            assert new is not None
            blocks = found + new
            for index in range(len(found), len(tokens)):
                contents[blocks[index]] = tokens[: index + 1]
                if data.draw(st.booleans()):
                    pool.publish(blocks[index], hashes[index], tokens[index])
            holders.append((blocks, tokens))
        if data.draw(st.booleans()):
            used = pool.used_blocks()
            contents = [kept if block in used else None for block, kept in enumerate(contents)]
        pool.check()
        refs = [0] * num_blocks
        for blocks, tokens in holders:
            for index, block in enumerate(blocks):
                assert contents[block] == tokens[: index + 1], "a held block was written over"
                refs[block] += 1
        assert pool.num_refs() == refs
        assert pool.num_free == refs.count(0)
