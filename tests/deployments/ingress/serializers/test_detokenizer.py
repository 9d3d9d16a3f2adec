"""Text from tokens: whole characters, stop strings wherever chunks end, nothing sent that must be taken back."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.deployments.ingress.serializers.detokenizer import StopMatcher, TextDelta, text_deltas
from app.engine.errors import AdapterTooLarge, EngineFailure
from app.engine.request import TokenChunk, TokenLogprobs, Usage


class Bytes:
    """One token per byte."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(bytes(token_ids))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def chunks_of(
    data: bytes, cuts: Sequence[int], *, reason: str = "length", matched_stop: int | None = None
) -> list[TokenChunk]:
    borders = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(borders)]
    chunks = [
        TokenChunk("r", tuple(piece), tuple(TokenLogprobs(token, -0.5) for token in piece)) for piece in pieces[:-1]
    ]
    if chunks:  # as engines tell it: with the first tokens and the last
        chunks[0] = chunks[0]._replace(usage=Usage(1, 0, len(pieces[0])))
    last = (*pieces[-1], *([] if matched_stop is None else [matched_stop]))
    logprobs = tuple(TokenLogprobs(token, -0.5) for token in last)
    return [*chunks, TokenChunk("r", last, logprobs, reason, matched_stop, Usage(1, 0, len(data)))]  # type: ignore[arg-type]


class Source:
    """Chunks from a list; remembers whether it was closed before its end."""

    def __init__(self, chunks: Sequence[TokenChunk]) -> None:
        self.chunks = chunks
        self.num_read = 0
        self.closed = False

    async def __call__(self) -> AsyncGenerator[TokenChunk]:
        try:
            for chunk in self.chunks:
                self.num_read += 1
                yield chunk
        finally:
            self.closed = True


async def deltas(source: Source, stops: Sequence[str] = ()) -> list[TextDelta]:
    return [delta async for delta in text_deltas(source(), Bytes(), stops)]


@given(
    text=st.text("abé漢🎉", max_size=30),
    stops=st.lists(st.text("abé漢", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
async def test_any_chunking_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    source = Source(chunks_of(text.encode(), cuts))
    result = await deltas(source, stops)
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    assert "".join(delta.text for delta in result) == (text[: min(found)[1]] if found else text)
    assert result[-1].finish_reason == ("stop" if found else "length")
    assert all(delta.finish_reason is None for delta in result[:-1])
    assert source.closed
    num_tokens = len((text[: min(found)[0]] if found else text).encode())
    assert result[-1].usage == Usage(1, 0, num_tokens), "what an answer took is counted, wherever borders fall"
    if not found:
        assert [token for delta in result for token in delta.token_ids] == list(text.encode())
        assert sum(len(delta.logprobs) for delta in result) == len(text.encode())


@given(text=st.text("ab", max_size=40), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_held_back_is_what_may_become_a_stop_string_and_no_more(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for index, character in enumerate(text):
        safe, stopped = matcher.push(character)
        sent += safe
        if stopped:
            assert any(text[: index + 1].endswith(stop) for stop in stops)
            return
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        num_held = max((len(b) for b in beginnings if text[: index + 1].endswith(b)), default=0)
        assert sent == text[: index + 1 - num_held]
    assert sent + matcher.finish() == text


async def test_a_stop_string_ends_the_sequence_early() -> None:
    source = Source(chunks_of(b"hello END and much more", [2, 6, 8, 10, 12, 14]))
    result = await deltas(source, ["END"])
    assert "".join(delta.text for delta in result) == "hello "
    assert source.num_read < len(source.chunks)
    assert source.closed, "closing the source aborts the sequence"


async def test_what_a_chunk_has_after_a_stop_string_is_not_reported() -> None:
    """Several tokens may come at once; the answer is that of one at a time."""
    whole, singly = (chunks_of(b"hello END and more", cuts) for cuts in ([2], range(1, 18)))
    for first in (whole, singly):
        last = (await deltas(Source(first), ["END"]))[-1]
        assert (last.finish_reason, last.stop, last.usage) == ("stop", "END", Usage(1, 0, len("hello END")))
    received = [[(d.token_ids, d.logprobs) for d in await deltas(Source(each), ["END"])] for each in (whole, singly)]
    assert [sum(column, ()) for column in zip(*received[0], strict=True)] == [
        sum(column, ()) for column in zip(*received[1], strict=True)
    ]


async def test_the_end_token_has_no_text_and_no_logprob() -> None:
    result = await deltas(Source(chunks_of(b"ab", [1], reason="stop", matched_stop=33)))
    assert "".join(delta.text for delta in result) == "ab"
    assert [token for delta in result for token in delta.token_ids] == [97, 98]
    assert result[-1].finish_reason == "stop"


async def test_half_a_character_at_the_end_is_replaced() -> None:
    result = await deltas(Source(chunks_of("é".encode()[:1], [])))
    assert result[-1].text == "\ufffd"


async def test_a_chunk_s_error_is_raised() -> None:
    error = AdapterTooLarge("too large")
    with pytest.raises(AdapterTooLarge, match="too large"):
        await deltas(Source([TokenChunk("r", finish_reason="error", error=error)]))
    with pytest.raises(EngineFailure):
        await deltas(Source([TokenChunk("r", finish_reason="error")]))


#: 200: <|end|>, 201: <x>, both without text.
SPECIALS = {200: "<|end|>", 201: "<x>"}


class Hiding(Bytes):
    """Leaves special tokens out."""

    def push(self, token_ids: Sequence[int]) -> str:
        return super().push([token_id for token_id in token_ids if token_id not in SPECIALS])


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(
    ("token_ids", "stops", "text", "stop"),
    [
        ([*b"ab", 200, *b"c"], ["<|end|>"], "ab", "<|end|>"),
        ([*b"ab<|end|>c"], ["<|end|>"], "ab", "<|end|>"),
        ([*b"ab", 201, 200, *b"c"], ["<x><|end|>"], "ab", "<x><|end|>"),
        ([*b"ab", 200, *b"cd"], ["b<|end|>c"], "a", "b<|end|>c"),
        ([*b"ab", 200, *b"cd"], ["b<|end|>d", "z"], "abcd", None),
        ([*b"ab", 201, *b"cd"], ["<|end|>", "cd<x>"], "abcd", None),
        ([201, 201, 200, *b"a"], ["<|end|>"], "", "<|end|>"),
    ],
)
async def test_stop_strings_may_have_special_tokens(
    size: int, token_ids: list[int], stops: list[str], text: str, stop: str | None
) -> None:
    async def source() -> AsyncGenerator[TokenChunk]:
        for start in range(0, len(token_ids), size):
            is_last = start + size >= len(token_ids)
            yield TokenChunk(
                "r", token_ids=tuple(token_ids[start : start + size]), finish_reason="length" if is_last else None
            )

    specials = {token_id: text for token_id, text in SPECIALS.items() if any(text in each for each in stops)}
    found = [delta async for delta in text_deltas(source(), Hiding(), stops, specials)]
    assert "".join(delta.text for delta in found) == text
    assert found[-1].stop == stop
    assert found[-1].finish_reason == ("length" if stop is None else "stop")


async def test_an_end_of_sequence_token_may_complete_a_stop_string() -> None:
    async def source() -> AsyncGenerator[TokenChunk]:
        yield TokenChunk("r", token_ids=(*b"ab", 200), finish_reason="stop", matched_stop=200)

    found = [delta async for delta in text_deltas(source(), Hiding(), ["<|end|>"], {200: "<|end|>"})]
    assert ("".join(delta.text for delta in found), found[-1].stop) == ("ab", "<|end|>")
