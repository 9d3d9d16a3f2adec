"""What the official client may send: null for every default, and its own answers back as messages."""

from __future__ import annotations

import time
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as LegacyParams
from pydantic import BaseModel

from app.deployments.ingress.http.routes.compat import LoadLoraBody
from app.deployments.ingress.http.routes.loras import ConfigureAdapterBody, RegisterAdapterBody
from app.deployments.ingress.schemas.loras import RollbackBody
from app.deployments.ingress.schemas.openai import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    CompletionRequest,
    GenerateBody,
    GenerateSampling,
    StreamOptions,
)
from app.deployments.ingress.schemas.request_model import parse_body
from app.engine.errors import InvalidRequest, UnsupportedField

MESSAGE = {"role": "user", "content": "hi"}
SMALLEST: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatCompletionRequest, {"model": "base", "messages": [MESSAGE]}),
    (CompletionRequest, {"model": "base", "prompt": "hi"}),
    (GenerateBody, {"text": "hi"}),
    (GenerateSampling, {}),
    (StreamOptions, {}),
    (RegisterAdapterBody, {}),
    (LoadLoraBody, {"lora_model": "a"}),
    (ConfigureAdapterBody, {}),
    (RollbackBody, {}),
]


@pytest.mark.parametrize(("kind", "smallest"), SMALLEST)
def test_null_is_the_default_of_every_field_that_has_one(kind: type[BaseModel], smallest: dict[str, Any]) -> None:
    plain = parse_body(kind, smallest)
    for name in kind.model_fields:
        if name not in smallest:
            assert parse_body(kind, smallest | {name: None}) == plain, name
            continue
        with pytest.raises(InvalidRequest) as caught:
            parse_body(kind, smallest | {name: None})
        assert caught.value.param == name
    assert parse_body(kind, smallest | {"nobody_knows_this": None}) == plain


def test_null_is_the_default_inside_of_fields_too() -> None:
    body = {"text": "hi", "sampling_params": {"temperature": None, "top_k": 5, "stop": None}}
    assert parse_body(GenerateBody, body) == parse_body(GenerateBody, {"text": "hi", "sampling_params": {"top_k": 5}})
    chat = {"model": "base", "messages": [MESSAGE], "stream": True}
    options = {"include_usage": None, "include_obfuscation": None}
    assert parse_body(ChatCompletionRequest, chat | {"stream_options": options}) == parse_body(
        ChatCompletionRequest, chat | {"stream_options": {}}
    )
    many = parse_body(GenerateBody, {"text": ["a", "b"], "lora_path": ["sql", None]})
    assert many.names == ["sql", None], "a null in a list is an answer of its own"


@pytest.mark.parametrize(
    ("kind", "smallest", "params"), [(*SMALLEST[0], ChatParams), (*SMALLEST[1], LegacyParams)], ids=["chat", "legacy"]
)
def test_the_official_clients_fields_may_all_be_null(
    kind: type[BaseModel], smallest: dict[str, Any], params: type
) -> None:
    names = {name for base in params.__mro__ for name in getattr(base, "__annotations__", {})}
    assert {"temperature", "stop", "logit_bias", "stream_options"} <= names
    plain = parse_body(kind, smallest)
    for name in sorted(names - set(smallest)):
        assert parse_body(kind, smallest | {name: None}) == plain, name


def test_an_answer_comes_back_as_the_client_got_it() -> None:
    answer = ChatCompletionMessage(role="assistant", content="hello")
    plain = {"model": "base", "messages": [MESSAGE, {"role": "assistant", "content": "hello"}]}
    parsed = parse_body(ChatCompletionRequest, plain)
    for extra in ({}, {"annotations": [], "tool_calls": []}):
        dumped = answer.model_dump() | extra
        body = {"model": "base", "messages": [MESSAGE, dumped]}
        assert parse_body(ChatCompletionRequest, body) == parsed
    for name, value in (("tool_calls", 1), ("nam", "ada"), ("audio", {"id": "1"})):
        body = {"model": "base", "messages": [MESSAGE, answer.model_dump() | {name: value}]}
        with pytest.raises(InvalidRequest) as caught:
            parse_body(ChatCompletionRequest, body)
        assert caught.value.param == f"messages.1.{name}"
        assert isinstance(caught.value, UnsupportedField) == (name != "tool_calls")


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"model": "base", "prompt": [-1] * 100_000}, "prompt.0"),
        (CompletionRequest, {"model": "base", "prompt": [[1], [-1] * 100_000]}, "prompt.1.0"),
        (CompletionRequest, {"model": "base", "prompt": ["a"] + [1] * 100_000}, "prompt.1"),
        (CompletionRequest, {"model": "base", "prompt": "hi", "stop": [1] * 100_000}, "stop.0"),
        (CompletionRequest, {"model": "base", "prompt": "hi", "stop_token_ids": ["a"] * 100_000}, "stop_token_ids.0"),
        (ChatCompletionRequest, {"model": "base", "messages": [{}] * 100_000}, "messages.0.role"),
        (ChatCompletionRequest, {"model": "base", "messages": [MESSAGE] + [0] * 100_000}, "messages.1"),
        (
            ChatCompletionRequest,
            {"model": "base", "messages": [MESSAGE | {"content": [{}] * 100_000}]},
            "messages.0.content.0.type",
        ),
        (
            ChatCompletionRequest,
            {"model": "base", "messages": [MESSAGE | dict.fromkeys(map("k{}".format, range(100_000)), 0)]},
            "messages.0.k0",
        ),
        (GenerateBody, {"text": [1] * 100_000}, "text.0"),
        (GenerateBody, {"text": "hi", "lora_path": [1] * 100_000}, "lora_path.0"),
    ],
)
def test_the_first_mistake_of_many_is_enough(kind: type[BaseModel], body: dict[str, Any], param: str) -> None:
    taken_s = []
    for _ in range(3):  # the fastest: a core that is shared with another thread is slower
        begin_s = time.process_time()
        with pytest.raises(InvalidRequest) as caught:
            parse_body(kind, body)
        taken_s.append(time.process_time() - begin_s)
        assert caught.value.param == param
    assert min(taken_s) < 0.3, taken_s


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ChatCompletionRequest, "max_tokens"),
        (ChatCompletionRequest, "max_completion_tokens"),
        (ChatCompletionRequest, "top_logprobs"),
        (ChatCompletionRequest, "n"),
        (CompletionRequest, "max_tokens"),
        (CompletionRequest, "logprobs"),
        (GenerateSampling, "max_tokens"),
        (GenerateSampling, "max_new_tokens"),
    ],
)
def test_a_number_too_long_to_be_written_is_refused(kind: type[BaseModel], field: str) -> None:
    """Python writes no integer of more than 4,300 digits: naming one in a message was a 500."""
    smallest = next(body for model, body in SMALLEST if model is kind)
    others = {"logprobs": True} if field == "top_logprobs" else {"max_tokens": 1}
    for number in (2**31, 10**5000):
        with pytest.raises(InvalidRequest, match="less than 2147483648") as caught:
            parse_body(kind, smallest | others | {field: number})
        assert caught.value.param == field


def test_more_messages_than_are_checked_are_refused() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)}
    with pytest.raises(InvalidRequest, match=str(MAX_MESSAGES)) as caught:
        parse_body(ChatCompletionRequest, body)
    assert caught.value.param == "messages"
