"""LlamaIndex, as its users write it: `llama_index_client.py URL MODEL`. A status of 0 says that all of it works."""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from order import ORDER, Order


def order(size: str, quantity: int) -> str:
    """Order something."""
    return f"{quantity} {size}"


def main(url: str, model: str) -> None:
    llm = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=12,
        temperature=0.0,
        max_retries=0,
        timeout=300,
    )
    whole = llm.chat([ChatMessage(role="user", content=ORDER)]).message.content
    streamed = "".join(piece.delta or "" for piece in llm.stream_chat([ChatMessage(role="user", content=ORDER)]))
    assert whole == streamed, (whole, streamed)
    assert whole
    completed = llm.model_copy(update={"is_chat_model": False}).complete("The quick brown fox").text
    assert completed
    longer = llm.model_copy(update={"max_tokens": 200})
    found = longer.structured_predict(Order, PromptTemplate("{text}"), text=ORDER)
    assert isinstance(found, Order), found
    tool = FunctionTool.from_defaults(order)
    answer = longer.chat_with_tools([tool], user_msg=ORDER, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = longer.get_tool_calls_from_response(answer)
    assert call.tool_name == "order", call
    assert set(call.tool_kwargs) == {"size", "quantity"}, call
    assert isinstance(call.tool_kwargs["quantity"], int), call


if __name__ == "__main__":
    main(*sys.argv[1:])
