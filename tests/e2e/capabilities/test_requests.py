"""What requests to an adapter may ask for, by a project's key."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.e2e.capabilities.conftest import Project
from tests.e2e.tiny import save_adapter

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASKED: Any = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture
def trip(project: Project) -> Project:
    save_adapter(project.folder / "trip", rank=4, seed=80)
    project.load("trip")
    return project


def test_structured_output_of_an_adapter(trip: Project) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": CITY, "strict": True}}
    with trip.openai() as client:
        answer = client.chat.completions.create(model="trip", messages=ASKED, response_format=schema, max_tokens=200)
    found = json.loads(answer.choices[0].message.content or "")
    assert found["city"] in ("Oslo", "Rome")
    assert 0 <= found["days"] <= 9


def test_a_tool_of_an_adapter(trip: Project) -> None:
    tool: Any = {"type": "function", "function": {"name": "book", "parameters": CITY}}
    with trip.openai() as client:
        answer = client.chat.completions.create(
            model="trip", messages=ASKED, tools=[tool], tool_choice="required", max_tokens=300
        )
    calls = answer.choices[0].message.tool_calls
    assert calls
    called: Any = calls[0]
    assert called.function.name == "book"
    assert json.loads(called.function.arguments)["city"] in ("Oslo", "Rome")


@pytest.mark.nightly  # it waits for 24 reports; tests/deployments/placement has the choice by day
def test_a_prompt_goes_where_its_beginning_is_cached(trip: Project) -> None:
    """Of two replicas the one that has it, as soon as its report has come: by chance half of the prompts would."""
    num_cached = 0
    with trip.openai() as client:
        for trial in range(12):
            for last in range(2):
                prompt = [3 + (index + trial) % 90 for index in range(400)] + [last]
                answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
                time.sleep(1.5)
            details = answer.usage and answer.usage.prompt_tokens_details
            num_cached += bool(details and details.cached_tokens)
    assert num_cached >= 11
