"""instructor, as its users write it: `instructor_client.py URL MODEL`. A status of 0 says that all of it works."""

from __future__ import annotations

import sys

import instructor
import openai
from order import ORDER, Order

MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
)


def main(url: str, model: str) -> None:
    for mode in MODES:
        client = instructor.from_openai(
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300), mode=mode
        )
        messages = [{"role": "user", "content": ORDER}]
        found = client.chat.completions.create(
            model=model, response_model=Order, messages=messages, temperature=0, max_retries=0
        )
        assert isinstance(found, Order), (mode, found)
        if mode is instructor.Mode.TOOLS:
            *_, last = client.chat.completions.create_partial(
                model=model, response_model=Order, messages=messages, temperature=0, max_retries=0
            )
            Order.model_validate(last.model_dump())  # a schema of its own: with fields that may be missing
        print(mode, "ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
