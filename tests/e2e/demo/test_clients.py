"""Clients of other people against the default service, as their users write them: the demo base and a demo adapter.

Each of them gets its structure by a grammar, so that what is asserted holds whatever the model says.
`test_more_clients.py` has those that want other versions of what is installed here.
"""

from __future__ import annotations

import io
import json
from typing import Any, Literal

import anthropic
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, SecretStr
from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from examples.training import tools
from tests.e2e.process import ServiceProcess

pytestmark = pytest.mark.e2e

BASE, ADAPTER = "smollm2-135m-instruct", "extract"
MODELS = (BASE, ADAPTER)
#: What a client gets wrong it gets wrong with an adapter, too: the base is asked nightly.
BY_DAY_AND_NIGHT = (pytest.param(BASE, marks=pytest.mark.nightly), ADAPTER)
QUESTION, RESULT = "What are 570 euros worth in USD?", "524.17 USD"
ORDER = "Hello, my name is Clara Sato. I would like nine desk lamps sent to Cork on Friday."


class Order(BaseModel):
    """What the adapter was trained to find. Short fields, so that a model that rambles comes to an end."""

    model_config = ConfigDict(extra="forbid")

    size: Literal["small", "large"]
    quantity: Literal[1, 2, 9]


PARAMETERS = Order.model_json_schema()
USER: Any = [{"role": "user", "content": ORDER}]


@pytest.mark.parametrize("model", BY_DAY_AND_NIGHT)
def test_openai_s_client(demo: ServiceProcess, model: str) -> None:
    """Chat, streamed and parsed; responses that go on from a stored one; tools of both; a batch."""
    function = {"name": "order", "parameters": PARAMETERS, "strict": True}
    fields: Any = {"model": model, "temperature": 0}
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        whole = client.chat.completions.create(messages=USER, max_tokens=12, **fields)
        with client.chat.completions.stream(messages=USER, max_tokens=12, **fields) as events:
            pieces = [event.delta for event in events if event.type == "content.delta"]
        assert "".join(pieces) == whole.choices[0].message.content
        parsed = client.chat.completions.parse(messages=USER, response_format=Order, **fields)
        assert isinstance(parsed.choices[0].message.parsed, Order)
        called = client.chat.completions.create(
            messages=USER, tools=[{"type": "function", "function": function}], tool_choice="required",
            parallel_tool_calls=False, **fields,
        ).choices[0]  # fmt: skip
        assert called.finish_reason == "tool_calls"
        assert called.message.tool_calls
        assert called.message.tool_calls[0].type == "function"
        Order.model_validate_json(called.message.tool_calls[0].function.arguments)
        first = client.responses.parse(input=ORDER, text_format=Order, store=True, **fields)
        assert isinstance(first.output_parsed, Order)
        with client.responses.stream(
            input="Again.", previous_response_id=first.id, max_output_tokens=8, **fields
        ) as stream:
            told = list(stream)
        assert told[0].type == "response.created"
        end = told[-1]
        assert end.type in ("response.completed", "response.incomplete")  # it may have more to say than 8 tokens
        assert end.response.usage is not None
        assert first.usage is not None
        assert end.response.usage.input_tokens > first.usage.input_tokens
        spoken = client.responses.create(
            input=ORDER, tools=[{"type": "function", **function}], tool_choice="required",
            parallel_tool_calls=False, **fields,
        ).output[0]  # fmt: skip
        assert spoken.type == "function_call"
        Order.model_validate_json(spoken.arguments)
        body = fields | {"messages": USER, "max_tokens": 12}
        line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
        file = client.files.create(file=io.BytesIO(json.dumps(line).encode() + b"\n"), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed", batch
        assert batch.output_file_id is not None
        (answer,) = client.files.content(batch.output_file_id).text.splitlines()
        answered = json.loads(answer)["response"]["body"]["choices"][0]["message"]["content"]
        assert answered == whole.choices[0].message.content, "the same bits in a batch"


@pytest.mark.parametrize("model", BY_DAY_AND_NIGHT)
def test_anthropic_s_client(demo: ServiceProcess, model: str) -> None:
    fields: Any = {"model": model, "messages": USER}
    with anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0, timeout=300) as client:
        greedy: Any = {"extra_body": {"temperature": 0}, "max_tokens": 12}
        whole = client.messages.create(**fields, **greedy)
        with client.messages.stream(**fields, **greedy) as stream:
            text = "".join(stream.text_stream)
        assert whole.content[0].type == "text"
        assert whole.content[0].text == text
        assert client.messages.count_tokens(**fields).input_tokens >= whole.usage.input_tokens
        call: Any = client.messages.create(
            **fields,
            max_tokens=200,
            tools=[{"name": "order", "input_schema": PARAMETERS}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        ).content[0]
        assert call.type == "tool_use"
        Order.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "ordered"}
        told: Any = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        assert client.messages.create(**fields | {"messages": told}, max_tokens=4).usage.output_tokens
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            client.messages.create(model="nobody", messages=USER, max_tokens=4)


@pytest.mark.parametrize("name", BY_DAY_AND_NIGHT)
async def test_pydantic_ai(demo: ServiceProcess, name: str) -> None:
    """Answers of a type: by a schema, and by a tool of the answer; text as a stream; over both of OpenAI's APIs."""
    async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        provider = OpenAIProvider(openai_client=client)
        for model in (OpenAIChatModel(name, provider=provider), OpenAIResponsesModel(name, provider=provider)):
            by_schema = await Agent(model, output_type=NativeOutput(Order), retries=0).run(ORDER)
            assert isinstance(by_schema.output, Order)
            by_tool = await Agent(model, output_type=ToolOutput(Order, strict=True), retries=0).run(ORDER)
            assert isinstance(by_tool.output, Order)
            async with Agent(model, model_settings={"max_tokens": 8}).run_stream(ORDER) as answer:
                pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
            assert "".join(pieces)


async def test_a_tool_is_called_and_what_it_answers_is_passed_on(demo: ServiceProcess) -> None:
    """The adapter for tools chooses one of six by itself, and pydantic-ai calls it.

    It was not trained with this number. Each token that it chooses, of the call and of what it says at last, is 5.5
    nats ahead of the next: no rounding changes that.
    """
    called: list[tuple[str, dict[str, Any]]] = []

    def tool(function: dict[str, Any]) -> Tool[None]:
        def call(**arguments: Any) -> str:
            called.append((function["name"], arguments))
            return RESULT

        return Tool.from_schema(call, function["name"], function["description"], function["parameters"])

    async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        model = OpenAIChatModel("tools", provider=OpenAIProvider(openai_client=client))
        given = [tool(each["function"]) for each in tools.TOOLS]
        agent = Agent(model, tools=given, retries=0, model_settings={"temperature": 0, "max_tokens": 64})
        answer = await agent.run(QUESTION)
    assert [name for name, _ in called] == ["convert_euros"]
    assert type(called[0][1]["amount"]) is int
    returned = [part for said in answer.all_messages() for part in said.parts if isinstance(part, ToolReturnPart)]
    assert [(part.tool_name, part.content) for part in returned] == [("convert_euros", RESULT)]
    assert answer.output


@pytest.mark.parametrize("model", BY_DAY_AND_NIGHT)
def test_langchain(demo: ServiceProcess, model: str) -> None:
    chat = ChatOpenAI(
        model=model, base_url=f"{demo.url}/v1", api_key=SecretStr("none"), temperature=0, max_retries=0, timeout=300
    )
    short = chat.bind(max_tokens=8)
    assert "".join(piece.text for piece in short.stream(ORDER)) == short.invoke([HumanMessage(ORDER)]).text
    assert isinstance(chat.with_structured_output(Order).invoke(ORDER), Order)
    by_tool = chat.with_structured_output(Order, method="function_calling", strict=True)
    assert isinstance(by_tool.invoke(ORDER), Order)
    called = chat.bind_tools([Order], tool_choice="required", strict=True, parallel_tool_calls=False).invoke(ORDER)
    (call,) = called.tool_calls
    Order.model_validate(call["args"])
