"""examples/generate.py, which docs/reference/generate.md shows, against a service with a fake engine."""

from __future__ import annotations

import httpx
import pytest

from examples.generate import generate


async def test_the_example_gets_one_result_per_text(http: httpx.AsyncClient) -> None:
    base, adapted = await generate(http, ["a", "a"], [None, "sql"])
    assert base["meta_info"]["lora"] is None
    assert adapted["meta_info"]["lora"] == "sql"
    assert adapted["meta_info"]["lora_generation"] == 1
    assert base["text"] != adapted["text"]
    assert base["meta_info"]["completion_tokens"] <= 32


async def test_the_example_raises_the_services_message(http: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="there is no model or adapter"):
        await generate(http, ["a"], ["nothing"])
