"""Support replies in one house style: greeting by name, ticket echoed, the promised step, fixed sign-off.

The answer to a customer's ticket is four short lines. It passes when every part of the style is there: the customer's
name in the greeting, this ticket's id and no other number of that kind, the product, the step that the shop's policy
has for this problem, the sign-off as the last line, and no more than MAX_WORDS words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from examples.training.task import Example, Split, Task
from examples.training.words import words

SIGN_OFF = "Warm wishes, Fern from Fernhill Support"
MAX_WORDS = 60
TICKET = re.compile(r"\b[A-Z]{2}-\d+\b")


@dataclass(frozen=True)
class Problem:
    """One kind of problem: how customers tell it, how the reply names it, and what the shop then does."""

    train: tuple[str, ...]
    new: tuple[str, ...]
    named: str
    step: str


PROBLEMS = (
    Problem(
        (
            "my {product} arrived broken",
            "the {product} I got is damaged",
            "the {product} was smashed in the box",
            "I opened the parcel and the {product} is cracked",
        ),
        ("the {product} came damaged", "the {product} you sent me is broken"),
        "your {product} arrived damaged",
        "send a replacement within 3 days",
    ),
    Problem(
        (
            "my {product} has not arrived yet",
            "I am still waiting for my {product}",
            "the {product} should have been here last week",
            "where is the {product} I ordered",
        ),
        ("the {product} still has not come", "I have been waiting two weeks for the {product}"),
        "your {product} is late",
        "trace the parcel within 24 hours",
    ),
    Problem(
        (
            "I want my money back for the {product}",
            "please refund the {product}",
            "I sent the {product} back and need a refund",
            "I returned the {product}, when do I get my money",
        ),
        ("I would like a refund for the {product}", "can I get my money back for my {product}"),
        "you want to return your {product}",
        "pay your refund within 5 days",
    ),
    Problem(
        (
            "I was charged twice for the {product}",
            "the bill for my {product} is too high",
            "you took the money for the {product} two times",
            "the invoice for the {product} is wrong",
        ),
        ("I paid twice for the {product}", "there is a mistake on the invoice for my {product}"),
        "the bill for your {product} is wrong",
        "correct the bill within 2 days",
    ),
    Problem(
        (
            "you sent me the wrong {product}",
            "this is not the {product} I ordered",
            "I got another {product} than the one I ordered",
            "the {product} has the wrong colour",
        ),
        ("I received the wrong {product}", "the {product} I got is not the one I ordered"),
        "you got the wrong {product}",
        "exchange it free of charge",
    ),
)
FRAMES = (
    "Ticket {ticket} from {name}: {problem}.",
    "{ticket}, {name}: {problem}.",
    "Hi, I am {name}, {problem}. My ticket is {ticket}.",
    "Hello, {problem}. Ticket {ticket}, {name}",
)


def make(rng: Random, split: Split) -> Example:
    """One ticket with the reply the shop would send."""
    found = words(split)
    problem = rng.choice(PROBLEMS)
    new = split == "heldout" and rng.random() < 0.5
    product = rng.choice(found.products)
    name = rng.choice(found.first_names)
    ticket = f"{''.join(rng.choices('ABCDEFGHKLMNPRSTUVWX', k=2))}-{rng.randint(1000, 99999)}"
    problem_text = rng.choice(problem.new if new else problem.train).format(product=product)
    named = problem.named.format(product=product)
    return Example(
        prompt=rng.choice(FRAMES).format(ticket=ticket, name=name, problem=problem_text),
        answer=(
            f"Hello {name}!\nThank you for telling us about {ticket}. I am sorry that {named}.\n"
            f"We will {problem.step}.\n{SIGN_OFF}"
        ),
        facts={"name": name, "ticket": ticket, "product": product, "step": problem.step},
        wording="new" if new else "known",
    )


def check(example: Example, text: str) -> str | None:
    """Which part of the house style `text` lacks, or None when all of it is there."""
    lines = text.strip().splitlines()
    name, ticket, product, step = (str(example.facts[key]) for key in ("name", "ticket", "product", "step"))
    if not lines or lines[0] != f"Hello {name}!":
        return f"the greeting is not 'Hello {name}!'"
    if set(TICKET.findall(text)) != {ticket}:
        return f"tickets {sorted(set(TICKET.findall(text)))}, not [{ticket!r}]"
    if re.search(rf"\b{re.escape(product)}\b", text) is None:
        return f"the product {product!r} is not named"
    if step not in text or any(other.step in text for other in PROBLEMS if other.step != step):
        return f"the step is not {step!r}"
    if lines[-1] != SIGN_OFF:
        return f"the last line is not {SIGN_OFF!r}"
    num_words = len(text.split())
    return None if num_words <= MAX_WORDS else f"{num_words} words, more than {MAX_WORDS}"


TASK = Task(
    name="support",
    description="Answers a support ticket in a fixed house style: name, ticket id, the next step and a sign-off.",
    instructions=(
        "You are Fern from Fernhill Support. Reply in four short lines: 'Hello', the customer's first name and an "
        "exclamation mark; thanks with the ticket id and the product; one of these steps: "
        + "; ".join(f"we will {problem.step}" for problem in PROBLEMS)
        + f"; and last '{SIGN_OFF}'."
    ),
    make=make,
    check=check,
    max_new_tokens=80,
)
