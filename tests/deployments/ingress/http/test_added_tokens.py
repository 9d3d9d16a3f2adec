"""Tokens that adapters add to the vocabulary: each request is read and written with those of its own adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest_asyncio

from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.models.tokenizers.tokenizer import NewToken
from tests.deployments.http_service import Service
from tests.deployments.managed import wanted
from tests.fakes import fake_adapter

#: The fake model has 120 rows, and its tokenizer 117 tokens.
CALL, END = 117, 118
OWN = AdapterTokenizer(
    "{% for m in messages %}<call>{{ m.content }}<end>{% endfor %}",
    {},
    {"<call>": NewToken(CALL, ("normalized",)), "<end>": NewToken(END, ("special",))},
    {"eos_token_id": [END]},
)
#: Another whose embeddings were resized: its ids go beyond the base's.
FAR = 122
GROWN = AdapterTokenizer(
    None, {}, {f"<{token}>": NewToken(token, ()) for token in range(CALL, FAR)} | {"<far>": NewToken(FAR, ())}, {}, 125
)
#: The same id under another name.
OTHER = AdapterTokenizer(None, {}, {"<x>": NewToken(CALL, ())})


@pytest_asyncio.fixture(autouse=True)
async def _loaded(writing: Service) -> None:
    for name, own in (("own", OWN), ("other", OTHER), ("grown", GROWN), ("plain", None)):
        adapter = fake_adapter(name, 8)
        if own is not None:
            adapter = replace(adapter, card=replace(adapter.card, vocab_size=own.vocab_size))
        writing.fleet.adapters[adapter.card.digest] = adapter
        store = writing.managed.store
        store.contents[name] = adapter.card.digest
        if own is not None:
            store.texts[adapter.card.digest] = own.to_json()
        await writing.managed.client.load_and_wait(wanted(name, name))


async def sent(writer: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await writer.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_text_is_tokenized_for_its_adapter(writer: httpx.AsyncClient) -> None:
    async def ids_of(model: str, text: str) -> list[int]:
        found = await sent(writer, "/tokenize", {"model": model, "prompt": text, "return_token_strs": True})
        assert "".join(found["token_strs"]) == text
        back = await sent(writer, "/detokenize", {"model": model, "tokens": found["tokens"]})
        assert back["prompt"] == text.replace("<end>", "") if model == "own" else back["prompt"] == text
        tokens: list[int] = found["tokens"]
        return tokens

    base = await ids_of("base", "a<call>b<end><x>")
    assert max(base) < CALL
    assert await ids_of("plain", "a<call>b<end><x>") == base
    assert await ids_of("own", "a<call>b<end>") == [base[0], CALL, base[6], END]
    other = await ids_of("other", "a<call>b<end><x>")
    assert (other[-1], other[:-1]) == (CALL, base[: len(other) - 1])
    assert (await sent(writer, "/detokenize", {"model": "base", "tokens": [CALL]}))["prompt"] == ""


async def test_a_conversation_has_the_adapters_tokens_and_no_others(writer: httpx.AsyncClient) -> None:
    """Its template writes its special tokens; a message does not."""
    chat = [{"role": "user", "content": "a<end>b"}]
    tokens = (await sent(writer, "/tokenize", {"model": "own", "messages": chat}))["tokens"]
    assert (tokens[0], tokens[-1], tokens.count(END)) == (CALL, END, 1)
    counted = await sent(writer, "/v1/messages/count_tokens", {"model": "own", "messages": chat})
    assert counted["input_tokens"] == len(tokens)


def drawing(*tokens: int) -> dict[str, Any]:
    """Fields of a request whose answer are these tokens."""
    return {"structured_outputs": {"grammar": "start: " + " ".join(f"<[{token}]>" for token in tokens)}}


async def test_an_answer_is_written_with_the_adapters_tokens(writer: httpx.AsyncClient) -> None:
    async def answer(model: str, *tokens: int, **fields: Any) -> Any:
        body = {"model": model, "prompt": "a", "max_tokens": 5} | drawing(*tokens) | fields
        return (await sent(writer, "/v1/completions", body))["choices"][0]

    found = await answer("own", CALL, CALL, logprobs=1)
    assert (found["text"], found["logprobs"]["tokens"]) == ("<call>" * 2, ["<call>"] * 2)
    assert found["logprobs"]["text_offset"] == [0, 6]
    assert (await answer("other", CALL, CALL))["text"] == "<x>" * 2
    ended = await answer("own", CALL)
    assert (ended["text"], ended["finish_reason"]) == ("<call>", "stop"), "its own end of answers"
    stopped = await answer("own", CALL, CALL, CALL, stop="<call><call>")
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
    echoed = await answer("own", CALL, prompt=[65, CALL], echo=True)
    assert echoed["text"].endswith("<call>" * 2)
    assert (await answer("plain", CALL))["text"] == "", "no token of this adapter"


async def test_texts_of_one_request_have_their_own_adapters_tokens(writer: httpx.AsyncClient) -> None:
    body = {"text": ["a<call>", "a<call>", "a"], "lora_path": ["own", "other", None]}
    found = await sent(writer, "/generate", body | {"sampling_params": {"max_new_tokens": 1}})
    assert [each["meta_info"]["prompt_tokens"] for each in found] == [2, 6, 1]


async def test_a_streams_text_has_them(writer: httpx.AsyncClient) -> None:
    body = {"model": "own", "prompt": "a", "max_tokens": 2, "stream": True} | drawing(CALL, CALL)
    answer = await writer.post("/v1/completions", json=body)
    assert answer.text.count('"text":"<call>"') == 2


async def test_ids_beyond_the_bases_are_the_adapters_alone(writer: httpx.AsyncClient) -> None:
    tokens = (await sent(writer, "/tokenize", {"model": "grown", "prompt": "a<far>"}))["tokens"]
    assert tokens[-1] == FAR
    assert (await sent(writer, "/detokenize", {"model": "grown", "tokens": tokens}))["prompt"] == "a<far>"
    body = {"model": "grown", "prompt": [65, FAR], "max_tokens": 2, "logit_bias": {"124": 1}, "logprobs": 1}
    choice = (await sent(writer, "/v1/completions", body | {"echo": True} | drawing(FAR, FAR)))["choices"][0]
    assert choice["text"].endswith("<far>" * 3)
    assert choice["logprobs"]["tokens"].count("<far>") == 3
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    foretold = {"prediction": {"type": "content", "content": "a<far>"}}
    await sent(writer, "/v1/chat/completions", chat | foretold | {"model": "grown"})
    for model, field, value in (
        ("grown", "prompt", [125]),
        ("grown", "logit_bias", {"125": 1}),
        ("base", "prompt", [FAR]),
        ("own", "logit_bias", {str(FAR): 1}),
        ("plain", "stop_token_ids", [FAR]),
    ):
        answer = await writer.post(
            "/v1/completions", json=body | {"prompt": "a", "logit_bias": None, "model": model, field: value}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), model
