"""Contents are the identity: what a name meant before, and what else it is called, changes no tokens."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.engine.adapters.raw_adapter import RawAdapter, RawModule, RawTensor, RawTokenRows, content_digest
from app.engine.pools.block_pool import root_hash
from app.engine.request import GenerateRequest, SamplingParams
from tests.budgets import examples
from tests.engine.test_engine import make_engine, run
from tests.fakes import fake_adapter, fake_request, fake_tokens

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 4


def named(request: GenerateRequest, name: str, generation: int = 1) -> GenerateRequest:
    assert request.adapter is not None
    return replace(request, adapter=replace(request.adapter, name=name, generation=generation))


def ask(request_id: str, adapter_name: str, adapter: object, generation: int = 1) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    return named(fake_request(request_id, PROMPT, adapter, sampling=sampling), adapter_name, generation)  # type: ignore[arg-type]


def test_old_streams_finish_on_the_old_weights_and_leave_no_kv_for_the_new() -> None:
    old, new = fake_adapter("first contents", 8), fake_adapter("second contents", 8)
    engine, backend = make_engine()
    running = ask("old", "mine", old)
    engine.submit(running, old)
    for _ in range(10):
        engine.step()
    fresh = ask("new", "mine", new, generation=2)
    engine.submit(fresh, new)  # the name has been registered again, in the middle of a stream
    chunks = run(engine)
    expected = [item.token_id for item in fake_tokens(fresh, new)]
    assert [t for chunk in chunks["new"] for t in chunk.token_ids] == expected
    tail = [t for chunk in chunks["old"] for t in chunk.token_ids]
    assert tail == [item.token_id for item in fake_tokens(running, old)][-len(tail) :]
    assert tail != expected[-len(tail) :], "the two do differ"
    usage = chunks["new"][-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0, "no block of the old contents"
    assert len(backend.writes) == 2


def test_a_renamed_adapter_keeps_its_prefixes_and_rows() -> None:
    adapter = fake_adapter("contents", 8)
    engine, backend = make_engine()
    cached = []
    for index, name in enumerate(["before", "after", "someone-elses-name-for-it"]):
        request = ask(str(index), name, adapter)
        engine.submit(request, adapter)
        chunks = run(engine)[str(index)]
        assert [t for chunk in chunks for t in chunk.token_ids] == [t.token_id for t in fake_tokens(request, adapter)]
        assert chunks[-1].usage is not None
        cached.append(chunks[-1].usage.cached_tokens)
    assert cached == [0, 24, 24]
    assert len(backend.writes) == 1, "equal contents share their rows"
    assert [resident.num_needed for resident in engine.stats().residents] == [8]


texts = st.text(st.characters(codec="utf-8"), max_size=12)


@given(texts, texts, st.binary(max_size=12), st.binary(max_size=12), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_no_digest_or_salt_spells_another_root(base: str, name: str, salt: bytes, other: bytes, is_base: bool) -> None:
    """Pieces of one field moved into the next give another root."""
    digest = None if is_base else name
    seen = {root_hash(base, digest, salt)}
    variants = {
        (base + name, "", salt),
        (base, name + salt.hex(), other),
        (base, salt.hex(), name.encode()),
        (base, "lora" + name, salt),
        (base, name, salt + other),
        (base, None, salt + b"lora"),
        (base, None, b"base"),
        ("", base + name, salt),
    } - {(base, digest, salt)}
    for variant in variants:
        seen.add(root_hash(*variant))
    assert len(seen) == len(variants) + 1


fields = st.sampled_from(["model", "magnitude", "bias", "parameter x", "token rows model", "F32", "", "a"])


@st.composite
def tensors(draw: st.DrawFn) -> RawTensor:
    data = draw(st.binary(max_size=8))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return RawTensor(draw(st.sampled_from(["F32", "F16", "I8"])), shape, memoryview(data), draw(st.binary(max_size=4)))


@st.composite
def adapters(draw: st.DrawFn) -> RawAdapter:
    paths = sorted(draw(st.sets(fields, min_size=1, max_size=2)))
    shape = tensors().map(lambda tensor: replace(tensor, shape=(1, 1)))
    modules = tuple(
        RawModule(path, draw(shape), draw(shape), 1.0, False, draw(st.none() | tensors()), draw(st.none() | tensors()))
        for path in paths
    )
    parameters = tuple((name, draw(tensors())) for name in sorted(draw(st.sets(fields, max_size=2))))
    rows = tuple(
        RawTokenRows(path, tuple(draw(st.lists(st.integers(0, 9), max_size=2))), draw(tensors()))
        for path in sorted(draw(st.sets(fields, max_size=1)))
    )
    return RawAdapter(modules, "", parameters, rows)


@given(adapters(), adapters(), st.sampled_from(["", "base", "model"]), st.sampled_from(["", "base", "model"]))
@settings(max_examples=examples(300), deadline=None)
def test_different_contents_have_different_digests(
    one: RawAdapter, other: RawAdapter, base: str, other_base: str
) -> None:
    assume((one, base) != (other, other_base))
    assert content_digest(one, base) != content_digest(other, other_base)
    assert content_digest(one, base) == content_digest(replace(one, description="another"), base)
