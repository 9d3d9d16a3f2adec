"""The official client against the running service."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.service.conftest import RANKS, Service
from tests.e2e.tiny import save_adapter
from tests.seeds import any_seed

MODELS = ["tiny", *RANKS, "tiny:r8"]


def random_request(rng: random.Random) -> dict[str, Any]:
    """A chat or completion request with a seed, so that it has one answer."""
    words = " ".join(rng.choice(["the", "quick", "fox", "again", "é", "漢", "42"]) for _ in range(rng.randint(1, 40)))
    request: dict[str, Any] = {
        "model": rng.choice(MODELS),
        "max_tokens": rng.randint(1, 40),
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_p": rng.choice([1.0, 0.9]),
        "seed": rng.randrange(2**31),
        "extra_body": {"ignore_eos": True},
    }
    if rng.random() < 0.5:
        return request | {"messages": [{"role": "user", "content": words}], "logprobs": True, "top_logprobs": 2}
    return request | {"prompt": words, "logprobs": 2}


async def run(client: openai.AsyncOpenAI, request: dict[str, Any]) -> tuple[str, list[float], str]:
    """(text, logprobs, finish reason) of a streamed request."""
    text, logprobs, reason = "", [], ""
    if "messages" in request:
        async for event in await client.chat.completions.create(**request, stream=True):
            choice = event.choices[0]
            text += choice.delta.content or ""
            if choice.logprobs is not None and choice.logprobs.content is not None:
                logprobs += [item.logprob for item in choice.logprobs.content]
            reason = choice.finish_reason or reason
    else:
        async for event in await client.completions.create(**request, stream=True):
            choice = event.choices[0]
            text += choice.text
            logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
            reason = choice.finish_reason or reason
    return text, logprobs, reason


async def test_64_concurrent_streams_equal_the_same_requests_alone(service: Service) -> None:
    rng = random.Random(any_seed())
    requests = [random_request(rng) for _ in range(64)]
    async with service.openai() as client:
        together = await asyncio.gather(*(run(client, request) for request in requests))
        alone = [await run(client, request) for request in requests]
    for request, one, many in zip(requests, alone, together, strict=True):
        assert one == many, request
        assert len(one[1]) == request["max_tokens"]
        assert one[2] == "length"
    greedy = {request["model"]: None for request in requests}
    assert len(greedy) > 3, "several adapters took part"


async def test_models_differ_and_names_are_equivalent(service: Service) -> None:
    async def text(model: str, **extra: Any) -> str:
        answer = await client.completions.create(
            model=model, prompt="the quick", max_tokens=24, temperature=0, extra_body={"ignore_eos": True} | extra
        )
        return answer.choices[0].text

    async with service.openai() as client:
        texts = {model: await text(model) for model in ["tiny", *RANKS]}
        assert len(set(texts.values())) == len(texts), "every adapter changes the answer"
        assert await text("tiny:r16") == texts["r16"]
        assert await text("tiny", lora_path="r16") == texts["r16"]
        assert await text("r16", lora_path="r16") == texts["r16"]
        assert await text("tiny", lora_path=None) == texts["tiny"]


async def test_streamed_and_whole_answers_agree(service: Service) -> None:
    request = {
        "model": "r8",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 30,
        "seed": 5,
        "n": 3,
        "extra_body": {"ignore_eos": True},
    }
    async with service.openai() as client:
        whole = await client.chat.completions.create(**request)
        texts = ["", "", ""]
        usage = None
        async for event in await client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        ):
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = event.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3, "n answers draw from different seeds"
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 90
    assert usage.prompt_tokens == whole.usage.prompt_tokens < 60, "the prompt is counted once"


async def test_a_seed_repeats_and_its_absence_does_not(service: Service) -> None:
    async with service.openai() as client:

        async def text(**fields: Any) -> str:
            answer = await client.completions.create(model="tiny", prompt="the", max_tokens=16, **fields)
            return answer.choices[0].text

        assert await text(seed=-3) == await text(seed=-3)
        assert len({await text() for _ in range(4)}) > 1


async def test_stop_strings_are_found_across_tokens(service: Service) -> None:
    async with service.openai() as client:
        base: dict[str, Any] = {
            "model": "r16",
            "prompt": "again",
            "max_tokens": 60,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        full = (await client.completions.create(**base)).choices[0].text
        for start in range(5, len(full) - 6, 7):
            stop = full[start : start + 5]
            if "\ufffd" in stop:
                continue
            answer = (await client.completions.create(**base, stop=["never this", stop])).choices[0]
            assert answer.text == full[: full.index(stop)]
            assert answer.finish_reason == "stop"
            pieces = [
                event.choices[0].text async for event in await client.completions.create(**base, stop=stop, stream=True)
            ]
            assert "".join(pieces) == answer.text


async def test_prompts_in_every_form(service: Service) -> None:
    async with service.openai() as client:
        fields: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0}
        two = await client.completions.create(prompt=["the quick", "lazy dog"], **fields)
        one = await client.completions.create(prompt="lazy dog", **fields)
        assert two.choices[1].text == one.choices[0].text
        ids = await client.completions.create(prompt=[5, 6, 7], **fields)
        many = await client.completions.create(prompt=[[5, 6, 7], [8]], **fields)
        assert ids.choices[0].text == many.choices[0].text
        assert many.usage is not None
        assert many.usage.prompt_tokens == 4


async def test_logprobs_are_those_of_the_tokens(service: Service) -> None:
    async with service.openai() as client:
        answer = await client.chat.completions.create(
            model="r1",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
        )
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content
        assert content
        for item in content:
            assert item.logprob <= 0
            assert len(item.top_logprobs) == 3
            assert item.top_logprobs[0].logprob == item.logprob, "greedy takes the likeliest"
        assert "".join(bytes(item.bytes or []).decode(errors="replace") for item in content)
        legacy = await client.completions.create(model="r1", prompt="x", max_tokens=4, temperature=0, logprobs=2)
        assert legacy.choices[0].logprobs is not None
        assert len(legacy.choices[0].logprobs.tokens or []) == 4


async def test_errors_have_openai_s_shape(service: Service) -> None:
    async with service.openai() as client:
        message: Any = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError, match="no model or adapter 'nope'"):
            await client.chat.completions.create(model="nope", messages=message)
        for name in ("tiny:../../etc", "../r1", "tiny:", "r1/..", "/etc/passwd"):
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model=name, messages=message)
        with pytest.raises(openai.BadRequestError, match="logit_bias") as refused:
            await client.chat.completions.create(model="tiny", messages=message, logit_bias={"99999999": 1})
        assert refused.value.param == "logit_bias"
        with pytest.raises(openai.BadRequestError, match=r"5000.*1024") as overflow:
            await client.chat.completions.create(model="tiny", messages=message, max_tokens=5000)
        assert overflow.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="frobnicate"):
            await client.chat.completions.create(model="tiny", messages=message, extra_body={"frobnicate": 1})
        accepted = await client.chat.completions.create(
            model="tiny", messages=message, max_tokens=1, user="u", metadata={"a": "b"}, store=False, tools=[]
        )
        assert accepted.choices


async def test_models_are_listed_with_root_and_parent(service: Service) -> None:
    async with service.openai() as client:
        listed = {model.id: model.model_dump() async for model in client.models.list()}
    assert set(RANKS) | {"tiny"} <= set(listed)
    assert listed["tiny"]["parent"] is None
    assert listed["r8"]["parent"] == "tiny"
    assert listed["r8"]["root"] == "r8"


def test_generate_takes_lists_with_nulls(service: Service) -> None:
    with service.http() as http:
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        body = {"text": ["a", "b", "a"], "lora_path": ["r8", None, None], "sampling_params": sampling}
        answers = http.post("/generate", json=body).raise_for_status().json()
        singles = [
            http.post("/generate", json={"text": text, "lora_path": lora, "sampling_params": sampling}).json()["text"]
            for text, lora in zip(body["text"], body["lora_path"], strict=True)
        ]
        assert [answer["text"] for answer in answers] == singles
        assert [answer["meta_info"]["lora"] for answer in answers] == ["r8", None, None]
        mismatch = http.post("/generate", json=body | {"lora_path": ["r8"]})
        assert mismatch.status_code == 400
        assert "1 entries" in mismatch.json()["error"]["message"]


async def test_a_chat_is_written_with_the_adapters_own_template(service: Service) -> None:
    """The conversation as the adapter's template writes it is the prompt; the base's chats stay as they are."""
    folder = service.loras / "templated"
    save_adapter(folder, rank=8, seed=77)
    template = "{% for m in messages %}Q: {{ m.content }}{{ eos_token }}{% endfor %}{{ 'A:' if add_generation_prompt }}"
    (folder / "chat_template.jinja").write_text(template)
    async with service.openai() as client, httpx.AsyncClient(base_url=service.url, timeout=600) as http:
        (await http.post("/v1/loras?wait=true", json={"name": "own", "path": "templated"})).raise_for_status()
        messages = [{"role": "user", "content": "the quick fox"}]
        common: dict[str, Any] = {"max_tokens": 20, "temperature": 0.8, "seed": 5, "extra_body": {"ignore_eos": True}}
        chat = await client.chat.completions.create(model="own", messages=messages, **common)
        written = await client.completions.create(model="own", prompt="Q: the quick fox<|im_end|>A:", **common)
        assert chat.usage is not None
        assert written.usage is not None
        assert chat.usage.prompt_tokens == written.usage.prompt_tokens
        assert chat.choices[0].message.content == written.choices[0].text
        base = await client.chat.completions.create(model="tiny", messages=messages, **common)
        assert base.usage is not None
        assert base.usage.prompt_tokens != chat.usage.prompt_tokens
        (await http.delete("/v1/loras/own")).raise_for_status()


async def test_several_adapters_answer_as_one(service: Service) -> None:
    """Weights count, a registered combination is the request's, and nothing of it is left when its name is gone."""

    async def text(model: str, **extra: Any) -> str:
        raw = await client.completions.with_raw_response.create(
            model=model, prompt="the quick", max_tokens=24, temperature=0, extra_body={"ignore_eos": True} | extra
        )
        shown.append(raw.headers.get("X-Polylora-Adapter", ""))
        return raw.parse().choices[0].text

    parts = [{"name": "r8", "weight": 0.8}, {"name": "r16", "weight": -0.6}]
    shown: list[str] = []
    async with service.openai() as client, httpx.AsyncClient(base_url=service.url, timeout=600) as http:
        both = await text("tiny", adapters=parts)
        assert set(shown[0].removesuffix("@1").split("+")) == {"r8*0.8", "r16*-0.6"}
        assert len({both, await text("tiny"), await text("r8"), await text("r16")}) == 4
        assert await text("tiny", adapters=parts[::-1]) == both, "a sum has no order"
        alone = [{"name": "r8"}, {"name": "r16", "weight": 0.0}]
        assert await text("tiny", adapters=alone) == await text("r8"), "without weight it adds nothing"
        made = await http.post("/v1/loras", json={"name": "mix", "combine": {"adapters": parts}, "wait": True})
        assert made.status_code == 201, made.text
        assert await text("mix") == both
        body = {"name": "no", "combine": {"adapters": parts, "method": "linear"}, "wait": True}
        with pytest.raises(openai.BadRequestError, match=r"'linear' needs equal ones; use 'cat'"):
            await client.post("/loras", body=body, cast_to=dict[str, Any])
        assert (await http.delete("/v1/loras/mix")).status_code == 200
        with pytest.raises(openai.NotFoundError):
            await text("mix")


async def test_names_with_a_slash_and_a_version_pass_the_proxy(service: Service) -> None:
    with service.http() as http:
        source = http.get("/v1/loras/r8").json()["path"]
        loaded = http.post("/v1/loras", json={"lora_name": "some-org/legal", "source": {"uri": f"file://{source}"}})
        assert loaded.status_code == 201, loaded.text
        digest = loaded.json()["digest"]
        for path in ("some-org/legal", "some-org%2Flegal", "some-org%2Flegal%40" + digest[:12]):
            answer = http.get(f"/v1/models/{path}")
            assert (answer.status_code, answer.json()["id"]) == (200, "some-org/legal"), answer.text
            assert http.get(f"/v1/loras/{path}/generations").json()["data"][0]["digest"] == digest
        body = {"model": f"some-org/legal@{digest[:8]}", "prompt": "hi", "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        async with service.openai() as client:
            assert (await client.models.retrieve("some-org/legal")).id == "some-org/legal"
        assert http.delete("/v1/loras/some-org%2Flegal").status_code == 200
