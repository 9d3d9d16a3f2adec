"""Incremental conversion of a sequence's `TokenChunk`s into `TextDelta`s.

Text is emitted only when no later token can change it: an incomplete UTF-8 character waits for its rest, and text that
may begin a stop string waits until it is known not to. A stop string ends the answer before itself, wherever chunks
end, and aborts the sequence. Tokens that end an answer (end of sequence, stop ids) have no text, and neither have
special tokens; the special tokens of stop strings are found nevertheless.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

from app.engine.errors import EngineFailure
from app.engine.request import FinishReason, RequestTiming, TokenChunk, TokenLogprobs, Usage


class Decoder(Protocol):
    """Incremental decoding (`app.engine.models.tokenizers.tokenizer.IncrementalDetokenizer`)."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """The remaining text; an incomplete character becomes U+FFFD."""
        ...


class TextDelta(NamedTuple):
    """One piece of an answer; the last one has a finish reason.

    `token_ids` and `logprobs` are those since the previous piece. `usage` counts all tokens so far, including those
    without text. `stop`: the stop string that ended the answer. `prompt_logprobs`: those of the prompt's tokens but the
    first, in the first piece, if the request asks for them. `timing`: the last one that the engine has sent.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    stop: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    timing: RequestTiming | None = None


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._buffer = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to send, the stop string that was found); a found stop string ends the answer."""
        if not self._stops:
            return text, None
        self._buffer += text
        matches = [(index + len(stop), index, stop) for stop in self._stops if (index := self._buffer.find(stop)) >= 0]
        if matches:
            # The one that is complete first, so that the answer does not depend on where pieces end.
            _, start, stop = min(matches)
            safe, self._buffer = self._buffer[:start], ""
            return safe, stop
        cut = len(self._buffer) - self._num_undecided()
        safe, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return safe, None

    def finish(self) -> str:
        """The buffered text: the answer ended, so it is not a stop string."""
        rest, self._buffer = self._buffer, ""
        return rest

    def _num_undecided(self) -> int:
        """Length of the longest suffix of the buffer that is a prefix of a stop string."""
        longest = min(len(self._buffer), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._buffer[-length:]) for stop in self._stops):
                return length
        return 0


class _SpecialStops:
    """Stop strings with special tokens, whose text a decoder leaves out: each such token is one noncharacter while stop
    strings are searched for."""

    def __init__(self, decoder: Decoder, stops: Sequence[str], specials: Mapping[int, str]) -> None:
        """specials: the special tokens in the stop strings, id → text."""
        self._decoder = decoder
        self._char_of = {token_id: chr(0xFDD0 + index) for index, token_id in enumerate(specials)}
        self._shown = {ord(char): "" for char in self._char_of.values()}
        self._original = {stop: stop for stop in stops}
        for stop in stops:
            marked = stop
            for token_id in sorted(specials, key=lambda each: -len(specials[each])):
                marked = marked.replace(specials[token_id], self._char_of[token_id])
            self._original[marked] = stop
        self.matcher = StopMatcher(tuple(self._original))

    def push(self, token_ids: Sequence[int], end_id: int | None) -> tuple[str, str | None]:
        """(text that is safe to send, the stop string that was found). end_id: the token behind them that ends the
        answer; it has no text, but it may complete a stop string."""
        if not self._char_of:
            text, stop = self.matcher.push(self._decoder.push(token_ids))
            return text, stop
        text, stop = self._match("".join(map(self._text_of, token_ids)))
        if stop is None and end_id in self._char_of:
            tail, stop = self._match(self._char_of[end_id])
            text += tail
        return text, stop

    def flush(self) -> tuple[str, str | None]:
        """The rest, as from `push`: the answer has ended."""
        tail, stop = self._match(self._decoder.flush())
        return (tail if stop is not None else tail + self.matcher.finish().translate(self._shown)), stop

    def _text_of(self, token_id: int) -> str:
        text, char = self._decoder.push((token_id,)), self._char_of.get(token_id)
        if char is None:
            return text
        self._shown[ord(char)] = text
        return char

    def _match(self, text: str) -> tuple[str, str | None]:
        safe, stop = self.matcher.push(text)
        return safe.translate(self._shown), None if stop is None else self._original[stop]


async def text_deltas(
    chunks: AsyncIterator[TokenChunk],
    decoder: Decoder,
    stops: Sequence[str],
    specials: Mapping[int, str] = {},
    *,
    keep_end: bool = False,
    keep_end_logprob: bool = False,
    on_failed: Callable[[TokenChunk], object] = lambda _: None,
) -> AsyncGenerator[TextDelta]:
    """Convert one sequence's chunks to text. Raises the error that a chunk carries, after `on_failed` has got it.

    Returning early (a stop string) closes `chunks`, which aborts the sequence. `specials`: the special tokens in the
    stop strings, id → text. `keep_end`: emit every token at once, even without text, including the one that ends the
    answer. `keep_end_logprob`: give that token's log-probability, too.
    """
    found = _SpecialStops(decoder, stops, specials)
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    usage: Usage | None = None
    timing: RequestTiming | None = None
    async with aclosing(chunks) as source:  # type: ignore[type-var]  # every source is a generator
        async for whole in source:
            if whole.finish_reason == "error":
                on_failed(whole)
                raise whole.error or EngineFailure("the engine ended the request without saying why")
            prompt_logprobs += whole.prompt_logprobs
            timing = whole.timing or timing
            for chunk in _one_by_one(whole) if stops and len(whole.token_ids) > 1 else (whole,):
                if chunk.usage is not None:
                    usage = chunk.usage
                elif usage is not None:
                    num_tokens = usage.completion_tokens + len(chunk.token_ids)
                    usage = Usage(usage.prompt_tokens, usage.cached_tokens, num_tokens)
                visible = chunk.token_ids[:-1] if chunk.matched_stop is not None else chunk.token_ids
                reported = chunk.token_ids if keep_end else visible
                token_ids += reported
                logprobs += chunk.logprobs if keep_end_logprob else chunk.logprobs[: len(reported)]
                text, stop = found.push(visible, chunk.matched_stop) if stops else (decoder.push(visible), None)
                reason: FinishReason | None = chunk.finish_reason if stop is None else "stop"
                if reason is not None and stop is None:
                    tail, stop = found.flush()
                    text += tail
                    reason = reason if stop is None else "stop"
                if text or reason is not None or (keep_end and token_ids):
                    yield TextDelta(text, token_ids, logprobs, reason, usage, stop, prompt_logprobs, timing)
                    token_ids, logprobs, prompt_logprobs = (), (), ()
                if reason is not None:
                    return


def _one_by_one(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """Split a chunk into chunks of one token, because a stop string ends the answer at the token that completes it."""
    num_tokens = len(chunk.token_ids)
    for index, token_id in enumerate(chunk.token_ids):
        usage = chunk.usage
        if usage is not None:
            num_so_far = usage.completion_tokens - (num_tokens - 1 - index)
            usage = Usage(usage.prompt_tokens, usage.cached_tokens, num_so_far)
        is_last = index == num_tokens - 1
        rest = chunk if is_last else TokenChunk(chunk.request_id)
        yield rest._replace(token_ids=(token_id,), logprobs=chunk.logprobs[index : index + 1], usage=usage)
