"""Tool calls: from a sentence to the one function that answers it, with its arguments.

A system message describes six functions. The answer is one call in Hermes' format or, after the function's result, one
line that passes it on. A call passes when it parses, and its name and all of its arguments are the wanted ones with the
right types. The conversation is rendered as the server renders it (`app/engine/models/chat/tool_call_formats.py`).
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from app.engine.models.chat.tool_call_formats import call_text, with_tools
from examples.training.extract import made_up, plural
from examples.training.task import ChatTurn, Example, Split, Task
from examples.training.words import split_list, words

RESULT_SHARE = 0.2
MADE_UP_SHARE = 0.4
CURRENCIES = ("EUR", "USD", "GBP", "JPY")
DAYS = ("today", "tomorrow")


def _tool(name: str, description: str, /, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = (
    _tool("get_weather", "The weather.", city=_STRING, day={"enum": list(DAYS)}),
    _tool("find_trains", "Trains between cities.", start=_STRING, end=_STRING),
    _tool("add_to_cart", "Order a product.", product=_STRING, quantity=_INTEGER),
    _tool("call_contact", "Telephone somebody.", name=_STRING),
    _tool("set_timer", "Ring after a while.", minutes=_INTEGER),
    _tool("convert_euros", "Change money.", amount=_INTEGER, currency={"enum": list(CURRENCIES[1:])}),
)
SYSTEM = str(with_tools([], TOOLS)[0]["content"])

KNOWN_WORDINGS = {
    "get_weather": split_list(
        "What is the weather in {city} {day}?| Will it rain in {city} {day}?| How warm is it in {city} {day}?| "
        "Do I need a coat in {city} {day}?| {city} {day}: sun or rain?| Tell me the forecast for {city} {day}.",
        "|",
    ),
    "find_trains": split_list(
        "When does a train leave {start} for {end}?| I want to go from {start} to {end} by train.| "
        "Trains from {start} to {end}, please.| How do I get from {start} to {end}?| "
        "I am in {start} and have to be in {end} tonight.| Find me a connection from {start} to {end}.",
        "|",
    ),
    "add_to_cart": split_list(
        "Order {quantity} {product}.| Put {quantity} {product} into my cart.| I need {quantity} {product}.| "
        "Buy {quantity} {product} for me.| Add {quantity} {product}, please.| We are out of {product}, get {quantity}.",
        "|",
    ),
    "call_contact": split_list(
        "Call {name}.| I have to talk to {name}.| Ring {name} for me.| Get me {name} on the phone.| "
        "Could you dial {name}?| Start a call with {name}, please.",
        "|",
    ),
    "set_timer": split_list(
        "Set a timer for {minutes} minutes.| Wake me in {minutes} minutes.| Remind me in {minutes} minutes.| "
        "The eggs need {minutes} minutes.| Count down {minutes} minutes.| {minutes} minutes from now, please ring.",
        "|",
    ),
    "convert_euros": split_list(
        "How much is {amount} euros in {currency}?| Convert {amount} euros to {currency}.| "
        "What are {amount} euros worth in {currency}?| Change {amount} euros into {currency}.| "
        "{amount} euros in {currency}, please.| I have {amount} euros, what is that in {currency}?",
        "|",
    ),
}
NEW_WORDINGS = {
    "get_weather": split_list(
        "Is it going to be sunny in {city} {day}?| What will the weather be in {city} {day}?", "|"
    ),
    "find_trains": split_list("Which train goes from {start} to {end}?| I need to travel from {start} to {end}.", "|"),
    "add_to_cart": split_list(
        "Please order {quantity} {product} for us.| I would like to buy {quantity} {product}.", "|"
    ),
    "call_contact": split_list("Please phone {name}.| I would like to speak to {name}.", "|"),
    "set_timer": split_list("Start a timer of {minutes} minutes.| Ring in {minutes} minutes.", "|"),
    "convert_euros": split_list(
        "Tell me what {amount} euros are in {currency}.| Turn {amount} euros into {currency}.", "|"
    ),
}


def make(rng: Random, split: Split) -> Example:
    """A sentence with the call that it needs, or a function's result with the line that repeats it."""
    new = split == "heldout" and rng.random() < 0.5
    name = rng.choice([str(tool["function"]["name"]) for tool in TOOLS])
    arguments = _arguments(name, rng, split)
    wording = rng.choice((NEW_WORDINGS if new else KNOWN_WORDINGS)[name])
    prompt = wording.format(**arguments)
    call = call_text({"function": {"name": name, "arguments": arguments}})
    if rng.random() >= RESULT_SHARE:
        return Example(prompt, call, {"tool": name, **arguments}, "new" if new else "known")
    result = _result(name, rng, split)
    message = with_tools([{"role": "tool", "content": result}], [])[0]
    before: tuple[ChatTurn, ...] = (("user", prompt), ("assistant", call))
    return Example(
        str(message["content"]), f"Here it is: {result}", {"result": result}, "new" if new else "known", before
    )


def _arguments(name: str, rng: Random, split: Split) -> dict[str, Any]:
    found = words(split)

    def value(choices: tuple[str, ...]) -> str:
        """A listed word; in training often a made-up one, which can only be copied."""
        if split == "train" and rng.random() < MADE_UP_SHARE:
            word = made_up(rng)
            return word.title() if choices[0].istitle() else word
        return rng.choice(choices)

    if name == "get_weather":
        return {"city": value(found.cities), "day": rng.choice(DAYS)}
    if name == "find_trains":
        return {"start": value(found.cities), "end": value(found.cities)}
    if name == "add_to_cart":
        return {"product": plural(value(found.products)), "quantity": _number(rng, 99, split)}
    if name == "call_contact":
        return {"name": f"{value(found.first_names)} {value(found.last_names)}"}
    if name == "set_timer":
        return {"minutes": _number(rng, 90, split)}
    return {"amount": _number(rng, 999, split), "currency": rng.choice(CURRENCIES[1:])}


def _number(rng: Random, most: int, split: Split) -> int:
    """A number from 2 to `most`; every seventh is held out."""
    return rng.choice([number for number in range(2, most + 1) if (number % 7 == 3) == (split == "heldout")])


def _result(name: str, rng: Random, split: Split) -> str:
    """A possible result of a function."""
    number = _number(rng, 59, split)
    return {
        "get_weather": f"{rng.choice(('sun', 'rain', 'snow', 'fog'))}, {number} degrees",
        "find_trains": f"the train leaves at {rng.randint(5, 22)}:{max(number, 10)}",
        "add_to_cart": f"{number} pieces ordered",
        "call_contact": rng.choice(("no answer", "the line is busy", "connected")),
        "set_timer": f"the timer rings in {number} minutes",
        "convert_euros": f"{_number(rng, 999, split)}.{rng.randint(10, 99)} {rng.choice(CURRENCIES[1:])}",
    }[name]


def read_call(text: str) -> dict[str, Any] | None:
    """{"tool": its name} with the arguments of an answer that is one call of a known function, else None.

    Arguments must be an object; callers check whether they are the function's own.
    """
    found = text.strip()
    if not found.startswith("<tool_call>") or not found.endswith("</tool_call>"):
        return None
    try:
        call = json.loads(found.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    except json.JSONDecodeError:
        return None
    names = [tool["function"]["name"] for tool in TOOLS]
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or call["name"] not in names:
        return None
    return {"tool": call["name"], **call["arguments"]} if isinstance(call["arguments"], dict) else None


def check(example: Example, text: str) -> str | None:
    """Why `text` is not the wanted call, or not the line that passes a result on; None when it is."""
    if "result" in example.facts:
        return None if text.strip() == example.answer else f"{example.facts['result']!r} is not passed on"
    found = read_call(text)
    if found is None:
        return "no call of a known function"
    for field in found.keys() | example.facts.keys():
        value, wanted = found.get(field), example.facts.get(field)
        if type(value) is not type(wanted) or value != wanted:
            return f"{field} is {value!r}, not {wanted!r}"
    return None


TASK = Task(
    name="tools",
    description="Calls the one of six functions that does what a sentence asks, and passes on what it answered.",
    instructions=f"{SYSTEM}\n\nAnswer with one call and nothing else; when a function has answered, say what it said.",
    make=make,
    check=check,
    max_new_tokens=64,
    system=SYSTEM,
)
