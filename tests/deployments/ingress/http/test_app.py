"""Routes over a fleet of fake engines: status codes, bodies and streams, without Ray or a socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Never

import httpx
import pytest
import zstandard
from pydantic_core import to_json

from app.config import LimitsConfig
from app.deployments.ingress.http.middleware import metering
from app.deployments.ingress.preprocess.sequence_builder import derived_seed
from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.schemas.ignored_fields import REQUEST
from app.deployments.ingress.schemas.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateBody,
    GenerateSampling,
)
from app.deployments.ingress.serializers.completion_events import sse, sse_bodies
from app.deployments.ingress.serializers.detokenizer import TextDelta
from app.deployments.ingress.serializers.openai import ChatSerializer
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from tests.deployments.http_service import Service
from tests.deployments.ingress.dispatch.test_dispatcher import until

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True}
EMPTY = {"role": "user", "content": ""}
LEGACY = {"model": "base", "prompt": "hi", "max_tokens": 6, "ignore_eos": True}


async def error_of(http: httpx.AsyncClient, route: str, body: Any) -> tuple[int, dict[str, Any]]:
    answer = await http.post(route, json=body)
    return answer.status_code, answer.json()["error"]


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_answers_and_streams_of_both_routes(http: httpx.AsyncClient) -> None:
    for route, body, text_of in (
        ("/v1/chat/completions", CHAT, lambda choice: choice["delta"].get("content", "")),
        ("/v1/completions", LEGACY, lambda choice: choice["text"]),
    ):
        whole = (await http.post(route, json=body | {"seed": 1, "n": 2})).json()
        stream = await http.post(
            route, json=body | {"seed": 1, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        )
        assert stream.headers["content-type"].startswith("text/event-stream")
        texts, reasons = ["", ""], [None, None]
        *pieces, last = events(stream.text)
        for event in pieces:
            assert event["usage"] is None, "as with OpenAI, until the last"
            (choice,) = event["choices"]
            texts[choice["index"]] += text_of(choice)
            reasons[choice["index"]] = choice["finish_reason"]
        expected = [c["message"]["content"] if "message" in c else c["text"] for c in whole["choices"]]
        assert texts == expected
        assert all(len(text) == 6 for text in texts)
        assert reasons == ["length", "length"]
        assert last["choices"] == []
        assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
        assert whole["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("include_usage", [True, False])
def test_an_event_of_text_alone_is_the_event_of_its_delta(is_chat: bool, include_usage: bool) -> None:
    def no_text(_: int) -> Never:
        raise AssertionError("only logprobs need it")

    for model in ("base", "\0", 'a "\0" b', "\\u0000"):
        answer_format = ChatSerializer(is_chat, "r-0", 0, model, no_text, no_text, no_text, False, include_usage)
        before, behind = answer_format.text_event(3)
        for text in ("a", '"\\', "\0", "\n\t\x7f\x1b", "é漢🎉", "\u2028</script>"):
            event = answer_format.event(3, TextDelta(text), 7)
            assert before + to_json(text) + behind == sse(event)
            assert [*sse_bodies(before + to_json(text) + behind)] == [event]


async def test_an_answer_that_ends_at_a_stop_string_is_counted(http: httpx.AsyncClient) -> None:
    body = LEGACY | {"temperature": 0, "max_tokens": 20}
    text = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    stop = text[4:7]
    length = text.index(stop) + len(stop)
    for changes in ({}, {"n": 2}):
        stopped = (await http.post("/v1/completions", json=body | {"stop": stop} | changes)).json()
        assert stopped["choices"][0]["text"] == text[: text.index(stop)]
        num_completion = length * len(stopped["choices"])
        assert (stopped["usage"]["prompt_tokens"], stopped["usage"]["completion_tokens"]) == (2, num_completion)
    streamed = body | {"stop": stop, "stream": True, "stream_options": {"include_usage": True}}
    usage = events((await http.post("/v1/completions", json=streamed)).text)[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, length)


async def test_adapters_are_chosen_by_any_spelling(http: httpx.AsyncClient) -> None:
    async def text(**fields: Any) -> str:
        body = LEGACY | {"temperature": 0, "max_tokens": 20} | fields
        return str((await http.post("/v1/completions", json=body)).json()["choices"][0]["text"])

    sql = await text(model="sql")
    assert sql != await text()
    assert (
        sql == await text(model="base:sql") == await text(lora_path="sql") == await text(model="sql", lora_path="sql")
    )
    status, error = await error_of(http, "/v1/completions", LEGACY | {"model": "sql", "lora_path": "other"})
    assert (status, error["param"]) == (400, "lora_path")
    for name in ("nope", "base:", "base:nope", "base:base", "other:sql", "sql:base", ":sql", "", "/roots/sql"):
        status, error = await error_of(http, "/v1/completions", LEGACY | {"model": name})
        assert (status, error["code"]) == (404, "model_not_found"), name


@pytest.mark.parametrize("name", sorted(name for name, values in REQUEST.items() if values is not None))
async def test_a_field_that_is_not_implemented_is_refused_by_name(http: httpx.AsyncClient, name: str) -> None:
    for route, body, kind in (
        ("/v1/chat/completions", CHAT, ChatCompletionRequest),
        ("/v1/completions", LEGACY, CompletionRequest),
    ):
        values = kind.ignored[name]
        if name in kind.model_fields:
            continue
        assert values is not None
        status, error = await error_of(http, route, body | {name: {"strange": 1}})
        assert (status, error["param"]) == (400, name)
        assert name in error["message"]
        assert all(json.dumps(neutral) in error["message"] for neutral in values), "as one would send it"
        for neutral in (*values, None):
            assert (await http.post(route, json=body | {name: neutral})).status_code == 200


async def test_inert_fields_are_accepted_and_unknown_ones_named(http: httpx.AsyncClient) -> None:
    nested = CHAT | {"messages": [{"role": "user", "content": "x", "nam": "bob"}]}
    status, error = await error_of(http, "/v1/chat/completions", nested)
    assert status == 400
    assert re.search(r"messages.0.nam: unknown field.*; did you mean 'name'\?", error["message"])
    status, error = await error_of(http, "/v1/completions", LEGACY | {"max_token": 3})
    assert error["message"].endswith("rejected rather than ignored; did you mean 'max_tokens'?")
    for route, body, field in (
        ("/v1/chat/completions", CHAT, "model"),
        ("/v1/completions", LEGACY, "model"),
        ("/generate", {"text": "x"}, "lora_path"),
    ):
        for name in ("lora_name", "adapter_id"):
            status, error = await error_of(http, route, body | {name: "sql"})
            assert (status, error["param"]) == (400, name)
            assert error["message"].endswith(f"; name the adapter in {field!r}")
    status, error = await error_of(http, "/v1/load_lora_adapter", {"name": "x", "lora_path": "sql"})
    takes = "this route takes lora_name, lora_path, load_inplace"
    assert error["message"] == f"unknown field 'name'; {takes}; did you mean 'lora_name'?"
    status, error = await error_of(http, "/generate", {"text": "x", "sampling_params": {"beam_width": 4}})
    assert status == 400
    assert "beam_width" in error["message"]
    for fields, param in (
        ({"y" * 5000: 1}, "y" * 80),
        ({"stream": True, "stream_options": {"z" * 5000: 1}}, "stream_options." + "z" * 80),
    ):
        answer = await http.post("/v1/chat/completions", content=json.dumps(CHAT | fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert len(answer.text) < 500


async def test_no_probability_at_all_is_the_likeliest_token(http: httpx.AsyncClient, service: Service) -> None:
    """Like OpenAI: with top_p 0 exactly one token is left, the likeliest."""
    assert (await http.post("/v1/completions", json=LEGACY | {"top_p": 0, "top_k": 5})).status_code == 200
    job = service.counted[-1][0]
    assert job is not None
    sampling = job.requests[0].sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)


async def test_messages_with_names_and_without_words(http: httpx.AsyncClient) -> None:
    named = [
        {"role": "user", "name": "ada", "content": "hi"},
        {"role": "assistant", "content": None},
        CHAT["messages"][0],
    ]
    assert (await http.post("/v1/chat/completions", json=CHAT | {"messages": named})).status_code == 200
    nothing = CHAT | {"messages": [{"role": "user", "content": None}]}
    status, error = await error_of(http, "/v1/chat/completions", nothing)
    assert (status, error["param"]) == (400, "messages.0")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("top_p", -0.1), ("top_p", 1.01), ("n", 0),
        ("n", 5), ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("seed", 2**64), ("stop", ""),
        ("stop", ["a", ""]), ("stop", ["x"] * 17), ("logprobs", 21), ("presence_penalty", 3), ("prompt", []),
        ("prompt", [[]]), ("prompt", ""), ("prompt", [61]), ("prompt", [-1]), ("prompt", [1.5]), ("prompt", ["a", 1]),
        ("prompt", None), ("model", None), ("stream", "yes"), ("stream_options", {"include_usage": True}),
    ],
)  # fmt: skip
async def test_values_out_of_range_are_refused(http: httpx.AsyncClient, field: str, value: Any) -> None:
    status, error = await error_of(http, "/v1/completions", LEGACY | {field: value})
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("prompt", "param", "says"),
    [
        ([3, -1], "prompt.1", "greater than or equal to 0"),
        ([[3], [4, 2**31]], "prompt.1.1", "less than 2147483648"),
        (["a", 1], "prompt.1", "valid string"),
    ],
)
async def test_the_item_of_a_prompt_that_cannot_be_used_is_named(
    http: httpx.AsyncClient, prompt: Any, param: str, says: str
) -> None:
    status, error = await error_of(http, "/v1/completions", LEGACY | {"prompt": prompt})
    assert (status, error["param"]) == (400, param)
    assert says in error["message"]


async def test_bodies_that_are_no_bodies(http: httpx.AsyncClient, service: Service) -> None:
    for content in (
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"a":NaN}',
        b'{"a":1,"a":2}',
        b"[" * 15_000,
    ):
        answer = await http.post("/v1/completions", content=content)
        assert answer.status_code == 400, content[:20]
    assert "the body is empty" in (await http.post("/v1/completions")).json()["error"]["message"]
    assert (await http.post("/v1/completions", content=b"x" * 20_001)).status_code == 413
    assert service.observed[-1] == ("completions", 413)


async def test_a_body_of_many_keys_is_read_in_one_pass(http: httpx.AsyncClient, service: Service) -> None:
    service.preprocessor.limits = LimitsConfig()
    content = "{" + ",".join(f'"k{number}":0' for number in [*range(20_000), 19_999]) + "}"
    taken_s = []
    for _ in range(3):  # other threads of this process may compute at the same time
        begin_s = time.process_time()
        error = (await http.post("/v1/completions", content=content)).json()["error"]
        taken_s.append(time.process_time() - begin_s)
        assert "'k19999' is given twice" in error["message"]
    assert min(taken_s) < 1


@pytest.mark.parametrize(
    ("body", "is_inline"),
    [
        (CompletionRequest(model="base", prompt="x" * 20_000), True),
        (CompletionRequest(model="base", prompt="x" * 20_001), False),
        (CompletionRequest(model="base", prompt=["x" * 5_000] * 4), True),
        (CompletionRequest(model="base", prompt=["x" * 5_001] * 4), False),
        (GenerateBody(text=["x" * 5_001] * 4, sampling_params=GenerateSampling(max_new_tokens=1)), False),
        (ChatCompletionRequest.model_validate({"model": "base", "messages": [EMPTY] * 600}), True),
        (ChatCompletionRequest.model_validate({"model": "base", "messages": [EMPTY] * 700}), False),
    ],
)
async def test_what_is_long_altogether_is_tokenized_in_a_thread(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    body: ChatCompletionRequest | CompletionRequest | GenerateBody,
    is_inline: bool,
) -> None:
    threads = set()

    def encode(*_: object) -> list[int]:
        threads.add(threading.get_ident())
        return [1]

    monkeypatch.setattr(service.preprocessor.tokenizer, "encode", encode)
    monkeypatch.setattr(service.preprocessor.tokenizer, "encode_chat", encode)
    if isinstance(body, ChatCompletionRequest):
        await service.preprocessor.chat(body, handle_principal())
    elif isinstance(body, CompletionRequest):
        await service.preprocessor.completion(body, handle_principal())
    else:
        await service.preprocessor.generate(body, handle_principal())
    assert len(threads) == 1
    assert (threads == {threading.get_ident()}) is is_inline


async def test_a_tenant_renders_one_adapters_template_at_a_time_and_others_do_not_wait_for_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of slow templates, whose clients leave, takes one place of the tenant's own."""
    free, running, most = threading.Event(), Counter[str](), Counter[str]()

    def encode(*fields: Any) -> list[int]:
        tenant_id = fields[-1]
        running[tenant_id] += 1
        most[tenant_id] = max(most[tenant_id], running[tenant_id])
        if tenant_id == "mallory":
            free.wait(60)
        running[tenant_id] -= 1
        return [1]

    preprocessor = service.preprocessor
    monkeypatch.setattr(preprocessor.tokenizer, "encode_chat", encode)
    text = AdapterTokenizer("a template of its own", {}, {}).to_json()
    monkeypatch.setattr(preprocessor.directory, "text", lambda _: text)
    body = ChatCompletionRequest.model_validate(CHAT)
    mallory, alice = (handle_principal()._replace(tenant_id=name) for name in ("mallory", "alice"))
    flood = [asyncio.ensure_future(preprocessor.chat_ids(body, None, mallory)) for _ in range(32)]
    await until(lambda: running["mallory"] == 1)
    flood[0].cancel()
    for _ in range(8):
        assert await preprocessor.chat_ids(body, None, alice) == [1]
    assert not any(render.done() for render in flood), "a cancelled rendering holds its place until it ends"
    free.set()
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [[1]] * 31
    assert most == {"mallory": 1, "alice": 1}


def raw_deflate(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "two members": ("x-gzip", lambda content: gzip.compress(content[:9]) + gzip.compress(content[9:])),
    "deflate": ("Deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
    "zstd": ("zstd", zstandard.compress),
    "two frames": ("zstd", lambda content: zstandard.compress(content[:9]) + zstandard.compress(content[9:])),
    "identity": ("identity", bytes),
}


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("num_chars", [1, 15_000])
async def test_a_compressed_body_is_decoded(http: httpx.AsyncClient, name: str, num_chars: int) -> None:
    encoding, pack = PACKERS[name]
    plain = LEGACY | {"temperature": 0}
    body = plain | {"metadata": {"a": "x" * num_chars}}
    answer = await http.post(
        "/v1/completions", content=pack(json.dumps(body).encode()), headers={"content-encoding": encoding}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == (await http.post("/v1/completions", json=plain)).json()["choices"]


@pytest.mark.parametrize(
    ("name", "route"),
    [(name, "/v1/completions") for name in PACKERS if name != "identity"]
    + [("gzip", "/v1/loras"), ("deflate", "/v1/batches/x/cancel")],
)
async def test_a_bomb_is_refused_at_the_limit(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, name: str, route: str
) -> None:
    encoding, pack = PACKERS[name]
    content = pack(b"[" + b" " * (32 << 20))
    taken = []
    received = metering._Body.receive

    async def receive(body: Any) -> Any:
        message = await received(body)
        taken.append(len(message.get("body", b"")))
        return message

    monkeypatch.setattr(metering._Body, "receive", receive)
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    answer = await http.post(route, content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert sum(taken) < 5 << 20, "a part behind the limit, at most"
    assert (await http.post("/v1/completions", json=LEGACY)).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_body_that_is_not_what_its_header_says_is_refused(http: httpx.AsyncClient, encoding: str) -> None:
    content = json.dumps(LEGACY).encode()
    _, pack = PACKERS[encoding]
    for wrong in (content, pack(content)[:-3], pack(content) + b"more"):
        answer = await http.post("/v1/completions", content=wrong, headers={"content-encoding": encoding})
        assert answer.status_code == 400, answer.text
        assert f"the body is not {encoding}: " in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "compress"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/files", "/v1/loras"])
async def test_an_unknown_encoding_is_named(http: httpx.AsyncClient, encoding: str, route: str) -> None:
    kind = "multipart/form-data; boundary=x" if route == "/v1/files" else "application/json"
    headers = {"content-encoding": encoding, "content-type": kind}
    answer = await http.post(route, content=b"x", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert repr(encoding) in answer.json()["error"]["message"]


async def test_context_overflow_gives_both_numbers(http: httpx.AsyncClient) -> None:
    status, error = await error_of(http, "/v1/completions", LEGACY | {"prompt": "x" * 100, "max_tokens": 29})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert "129" in error["message"]
    assert "128" in error["message"]
    whole = await http.post("/v1/chat/completions", json={k: v for k, v in CHAT.items() if k != "max_tokens"})
    usage = whole.json()["usage"]
    assert usage["total_tokens"] == 128, "without a limit, the answer may fill the context"


async def test_engines_that_hold_less_than_the_context_are_filled_and_not_overflowed(
    http: httpx.AsyncClient, service: Service
) -> None:
    """Like when `num_kv_blocks: 0` takes what the device has left: only the engine knows how much that is."""
    service.fleet.kv_tokens["replica-0"] = 64
    whole = await http.post("/v1/chat/completions", json={k: v for k, v in CHAT.items() if k != "max_tokens"})
    assert whole.json()["usage"]["total_tokens"] == 64
    _, error = await error_of(http, "/v1/completions", LEGACY | {"prompt": "x" * 60, "max_tokens": 5})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "holds 64" in error["message"]
    assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 64


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/completions", {"model": "base", "prompt": "x" * 128}, "prompt"),
        ("/v1/chat/completions", {"model": "base", "messages": [{"role": "user", "content": "x" * 128}]}, "messages"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 500}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": None, "max_completion_tokens": 500}, "max_completion_tokens"),
        ("/generate", {"text": "x" * 128}, "text"),
        ("/generate", {"text": ""}, "text"),
        ("/generate", {"text": []}, "text"),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 500}}, "sampling_params.max_new_tokens"),
        ("/generate", {"text": "x", "sampling_params": {"max_tokens": 500}}, "sampling_params.max_tokens"),
        ("/v1/completions", {**LEGACY, "prompt": ["x"] * 5}, "prompt"),
        ("/v1/completions", {**LEGACY, "prompt": ["x"] * 2, "n": 3}, "n"),
        ("/v1/chat/completions", {**CHAT, "n": 5}, "n"),
        ("/generate", {"text": ["x"] * 5}, "text"),
        ("/generate", {"text": "x", "sampling_params": {"n": 5}}, "sampling_params.n"),
        ("/v1/completions", {**LEGACY, "logprobs": 21}, "logprobs"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_what_is_too_much_is_called_what_the_client_called_it(
    http: httpx.AsyncClient, route: str, body: Any, param: str
) -> None:
    status, error = await error_of(http, route, body)
    assert (status, error["param"]) == (400, param)


async def test_generate_keeps_order_and_counts(http: httpx.AsyncClient) -> None:
    body = {"text": ["a", "b", "a"], "lora_path": ["sql", None, None], "sampling_params": {"max_new_tokens": 4}}
    results = (await http.post("/generate", json=body)).json()
    assert [result["meta_info"]["lora"] for result in results] == ["sql", None, None]
    for field in ({"lora_path": ["sql"]}, {"lora_path": []}, {"text": "a"}):
        status, error = await error_of(http, "/generate", body | field)
        assert status == 400, field
        assert "entries" in error["message"]
    single = (
        await http.post("/generate", json={"text": "a", "lora_path": "sql", "sampling_params": {"max_new_tokens": 4}})
    ).json()
    assert single["meta_info"]["lora"] == "sql"


async def test_without_a_replica_nothing_is_ready(http: httpx.AsyncClient, service: Service) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.head("/health")).status_code == 200, "what some load balancers ask"
    service.fleet.drop("replica-0")
    assert (await http.get("/health")).status_code == 503
    assert (await http.head("/health")).status_code == 503
    answer = await http.post("/v1/completions", json=LEGACY | {"stream": True})
    assert answer.status_code == 503, "a refused stream has its proper status"
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_full_queue_is_429_also_for_a_stream(http: httpx.AsyncClient, service: Service) -> None:
    replica = service.fleet.add()
    service.fleet.drop("replica-0")
    replica.engine._waiting.max_total = 0
    for stream in (False, True):
        answer = await http.post("/v1/completions", json=LEGACY | {"stream": stream})
        assert answer.status_code == 429
        assert "retry-after" in answer.headers


async def test_a_bug_is_a_500_that_tells_nothing(
    http: httpx.AsyncClient, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.preprocessor.resolver._registry = None  # type: ignore[assignment]
    answer = await http.post("/v1/completions", json=LEGACY | {"model": "sql"})
    assert answer.status_code == 500
    assert "NoneType" not in answer.text
    assert "NoneType" in caplog.text


@pytest.mark.parametrize("num_answers", [1, 2])
async def test_a_request_that_takes_too_long_is_504_and_aborted(
    http: httpx.AsyncClient, service: Service, num_answers: int
) -> None:
    (replica,) = service.fleet.replicas.values()
    replica.backend.max_steps = 0
    timeout_s = 0.05
    while len(replica.submitted) < num_answers:  # on a machine so busy that the time is up before, a longer one
        service.preprocessor.limits = service.preprocessor.limits.model_copy(update={"request_timeout_s": timeout_s})
        answer = await http.post("/v1/completions", json=LEGACY | {"n": num_answers})
        assert answer.status_code == 504
        timeout_s *= 2
    await until(lambda: sorted(replica.aborted) == sorted(request.request_id for request in replica.submitted))
    replica.backend.resumed.set()
    await until(lambda: not replica.engine.has_work)
    assert replica.thread.stats().num_aborted == len(replica.aborted)


def test_derived_seeds_differ_and_the_first_is_the_request_s_own() -> None:
    assert derived_seed(5, 0) == 5
    assert derived_seed(-1, 0) == 2**64 - 1
    seeds = {derived_seed(seed, copy) for seed in range(20) for copy in range(64)}
    assert len(seeds) == 20 * 64
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_equal_prompts_without_a_seed_have_different_answers(service: Service) -> None:
    preprocessor = service.preprocessor
    for seed, number in ((None, 4), (7, 2)):
        body = CompletionRequest(model="base", prompt=["hi", "hi"], n=2, seed=seed)
        seeds = [
            request.sampling.seed for request in (await preprocessor.completion(body, handle_principal())).requests
        ]
        assert len(set(seeds)) == number
        params = GenerateSampling(max_new_tokens=1, n=2, seed=seed)
        job = await preprocessor.generate(GenerateBody(text=["hi", "hi"], sampling_params=params), handle_principal())
        assert len({request.sampling.seed for request in job.requests}) == number
    assert seeds == [7, derived_seed(7, 1)] * 2, "with one, each prompt's are what they are when it comes alone"


async def test_a_request_arrives_before_it_is_tokenized(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized_s = []

    def encode(*_: object) -> list[int]:
        tokenized_s.append(time.time())
        time.sleep(0.01)
        return [1]

    monkeypatch.setattr(service.preprocessor.tokenizer, "encode", encode)
    monkeypatch.setattr(service.preprocessor.tokenizer, "encode_chat", encode)
    for job in (
        await service.preprocessor.completion(CompletionRequest(model="base", prompt="hi"), handle_principal()),
        await service.preprocessor.chat(ChatCompletionRequest.model_validate(CHAT), handle_principal()),
        await service.preprocessor.generate(
            GenerateBody(text="hi", sampling_params=GenerateSampling(max_new_tokens=1)), handle_principal()
        ),
    ):
        assert job.requests[0].arrival_s <= tokenized_s.pop(0)


async def test_a_slash_at_the_end_changes_nothing(http: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/v1/models/sql", "/health"):
        assert (await http.get(f"{path}/")).json() == (await http.get(path)).json()
    greedy = LEGACY | {"temperature": 0}
    with_slash, without = [await http.post(f"/v1/completions{end}", json=greedy) for end in ("/", "")]
    assert with_slash.status_code == 200
    assert with_slash.json()["choices"] == without.json()["choices"]
    assert (await http.get("/v1/nothing/")).status_code == 404


async def test_what_is_not_served_says_what_is(http: httpx.AsyncClient) -> None:
    for answer, status, says in (
        (await http.post("/v1/images", json={}), 404, "nothing at '/v1/images'.*POST /v1/chat/completions"),
        (await http.get("/v2/models"), 404, "GET /v1/models lists"),
        (await http.get("/v1/completions"), 405, "'/v1/completions' does not take GET, only POST"),
    ):
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["code"] == "no_route"
        assert re.search(says, error["message"]), error


async def test_every_method_of_a_path_is_named(http: httpx.AsyncClient) -> None:
    """Each method is a route of its own, and the first one's is not all."""
    for path, methods in (
        ("/v1/loras", "GET, HEAD, POST"),
        ("/v1/aliases/x", "DELETE, GET, HEAD, PUT"),
        ("/v1/organization/projects", "GET, HEAD, POST"),
        ("/v1/completions", "POST"),
    ):
        answer = await http.request("TRACE", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)
        assert answer.json()["error"]["message"] == f"{path!r} does not take TRACE, only {methods}"


@pytest.mark.parametrize(
    ("route", "body", "param", "says"),
    [
        ("/v1/chat/completions", {**CHAT, "messages": ["hi"]}, "messages.0", "should be an object"),
        ("/v1/chat/completions", {**CHAT, "stream_options": 1}, "stream_options", "should be an object"),
        ("/generate", {"text": "x", "sampling_params": []}, "sampling_params", "should be an object"),
        ("/v1/aliases/x", {"targets": ["sql"]}, "targets", "should be an object"),
        ("/generate", {"text": "x", "stream": True}, "stream", "/v1/completions does"),
    ],
)
async def test_what_is_wrong_is_said_in_words_of_json(
    http: httpx.AsyncClient, route: str, body: Any, param: str, says: str
) -> None:
    answer = await http.request("PUT" if "alias" in route else "POST", route, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("content", "param", "says"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://x"}}], "messages.0.content.0.type", "one of text"),
        ([{"type": "text", "text": "a"}, {"type": "text"}], "messages.0.content.1.text", "Field required"),
        ([{"type": "text", "text": 5}], "messages.0.content.0.text", "valid string"),
        (5, "messages.0.content", "valid string"),
    ],
)
async def test_a_part_of_a_message_that_cannot_be_read_is_named(
    http: httpx.AsyncClient, content: Any, param: str, says: str
) -> None:
    status, error = await error_of(
        http, "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": content}]}
    )
    assert status == 400
    assert error["param"] == param
    assert says in error["message"]
