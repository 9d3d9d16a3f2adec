"""Answers in OpenAI's words, where a token is less than a character."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.deployments.ingress.dispatch.generation_task import SequenceOutput
from app.deployments.ingress.serializers.detokenizer import TextDelta
from app.deployments.ingress.serializers.openai import TOKENS_AT_ONCE, ChatSerializer, TokenOffsets
from app.engine.request import TokenLogprobs

#: Token ids 0 to 6: a word, three bytes of one character, another first byte, punctuation, one that no text shows.
TOKENS = (b"See ", b"\xe6", b"\xbc", b"\xa2", b"\xe5", b"!", b"<|im_end|>")
SPECIAL = 6


def answer_format(*, is_chat: bool = False) -> ChatSerializer:
    return ChatSerializer(
        is_chat=is_chat,
        request_id="cmpl-1",
        created=0,
        model="base",
        token_text=lambda token_id: TOKENS[token_id].decode(errors="replace"),
        token_bytes=TOKENS.__getitem__,
        text_bytes=lambda token_id: b"" if token_id == SPECIAL else TOKENS[token_id],
        want_logprobs=True,
    )


def drawn(token_id: int, *top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5 - token_id, tuple((other, -0.5 - other) for other in top))


LOGPROBS = (drawn(0, 0, 5), drawn(1, 1, 2, 4), drawn(2, 1), drawn(3), drawn(5))


def logprobs_of(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs: dict[str, Any] = choice["choices"][0]["logprobs"]
    return logprobs


async def body_of(serializer: ChatSerializer, answer: SequenceOutput) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(await serializer.content([answer], 1))
    return body


async def test_parts_of_characters_are_distinguished() -> None:
    answer = SequenceOutput("See 漢!", [0, 1, 2, 3, 5], list(LOGPROBS), "length")
    logprobs = logprobs_of(await body_of(answer_format(), answer))
    assert logprobs["tokens"] == ["See ", r"bytes:\xe6", r"bytes:\xbc", r"bytes:\xa2", "!"]
    assert logprobs["top_logprobs"][1] == {r"bytes:\xe6": -1.5, r"bytes:\xbc": -2.5, r"bytes:\xe5": -4.5}
    assert logprobs["top_logprobs"][2] == {r"bytes:\xe6": -1.5, r"bytes:\xbc": -2.5}


async def test_offsets_are_those_of_characters() -> None:
    answer = SequenceOutput("See 漢!", [0, 1, 2, 3, 5], list(LOGPROBS), "length")
    found = logprobs_of(await body_of(answer_format(), answer))["text_offset"]
    assert found == [0, 4, 4, 4, 5]
    assert answer.text[found[-1] :] == "!"


async def test_a_token_that_the_text_does_not_show_takes_no_place_in_it() -> None:
    answer = SequenceOutput(
        "See 漢!", [0, 1, 6, 2, 3, 6, 5], [drawn(token_id) for token_id in (0, 1, 6, 2, 3, 6, 5)], "length"
    )
    logprobs = logprobs_of(await body_of(answer_format(), answer))
    assert logprobs["text_offset"] == [0, 4, 4, 4, 4, 5, 5]
    assert logprobs["tokens"][2] == "<|im_end|>"


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_stream_has_the_same_offsets_wherever_it_is_cut(cut: int) -> None:
    """Also when a piece ends within a character, or its text is held back."""
    form = answer_format()
    offsets = TokenOffsets(form.text_bytes)
    pieces = [TextDelta("See", logprobs=LOGPROBS[:cut]), TextDelta(" 漢!", logprobs=LOGPROBS[cut:])]
    found = [logprobs_of(form.event(0, piece, offsets))["text_offset"] for piece in pieces]
    assert found[0] + found[1] == [0, 4, 4, 4, 5]


async def test_the_likeliest_of_tokens_with_one_text_is_reported_and_the_drawn_one_always() -> None:
    """Two token ids may have the same text; a dictionary has it once."""
    form = ChatSerializer(
        is_chat=False,
        request_id="cmpl-1",
        created=0,
        model="base",
        token_text=lambda token_id: "ab"[token_id % 2],
        token_bytes=lambda token_id: b"ab"[token_id % 2 : token_id % 2 + 1],
        text_bytes=lambda token_id: b"ab"[token_id % 2 : token_id % 2 + 1],
        want_logprobs=True,
    )
    answer = SequenceOutput("b", [3], [TokenLogprobs(3, -4.0, ((0, -1.0), (1, -2.0), (2, -3.0)))], "stop")
    assert logprobs_of(await body_of(form, answer))["top_logprobs"] == [{"a": -1.0, "b": -4.0}]


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
@pytest.mark.parametrize("is_chat", [True, False])
async def test_what_json_has_no_number_for_is_a_number(logprob: float, is_chat: bool) -> None:
    answer = SequenceOutput("See ", [0], [TokenLogprobs(0, logprob, ((0, logprob), (5, -1.0)))], "length")
    logprobs = logprobs_of(await body_of(answer_format(is_chat=is_chat), answer))
    json.dumps(logprobs, allow_nan=False)
    assert (logprobs["content"][0]["logprob"] if is_chat else logprobs["token_logprobs"][0]) == -9999.0


async def test_chat_names_every_byte() -> None:
    answer = SequenceOutput("See 漢!", [0, 1, 2, 3, 5], list(LOGPROBS), "length")
    content = logprobs_of(await body_of(answer_format(is_chat=True), answer))["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "See 漢!"
    assert [entry["bytes"] for entry in content[1]["top_logprobs"]] == [[0xE6], [0xBC], [0xE5]]


@pytest.mark.parametrize("num_tokens", [0, 1, TOKENS_AT_ONCE, 2 * TOKENS_AT_ONCE + 3])
@pytest.mark.parametrize("is_chat", [True, False])
async def test_log_probabilities_written_in_parts_are_those_of_all(num_tokens: int, is_chat: bool) -> None:
    form = answer_format(is_chat=is_chat)
    logprobs = [drawn(number % 6, 0, 1, 5) for number in range(num_tokens)]
    found = await body_of(form, SequenceOutput("x", [], logprobs, "length"))
    assert (
        logprobs_of(found)
        == form.event(0, TextDelta("", (), tuple(logprobs)), TokenOffsets(form.text_bytes))["choices"][0]["logprobs"]
    )
