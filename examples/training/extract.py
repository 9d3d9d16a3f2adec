"""Delivery messages to JSON: who wants how many of what, where and when.

The answer is one JSON object with the five fields below, null for a field that the message lacks. It passes when it
parses and holds exactly these fields with the right values and types; key order and white space do not matter. A number
that is written as a word becomes an integer.
"""

from __future__ import annotations

import json
from random import Random

from examples.training.task import Example, Split, Task
from examples.training.words import HELDOUT, split_list, words

FIELDS = ("name", "item", "quantity", "city", "day")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MADE_UP_SHARE = 0.5
STARTS = split_list("b, br, c, ch, d, dr, f, fl, g, gr, h, j, k, l, m, n, p, pl, qu, r, s, sh, st, t, tr, v, w, z")
VOWELS = split_list("a, e, i, o, u, ai, ea, ee, ie, io, oo, ou")
ENDINGS = split_list("ck, der, ga, l, ler, ma, mer, n, nd, ner, nia, r, ra, rd, rt, ta, ter, tin, ton, vi, x")

KNOWN_WORDINGS = (
    "Hi, this is {name}. Please send {quantity} {item} to {city} on {day}.",
    "Hello, {name} here, I need {quantity} {item} delivered to {city} by {day}.",
    "{name} from {city} would like {quantity} {item} on {day}.",
    "Please bring {quantity} {item} to our shop in {city} on {day}. Regards, {name}",
    "On {day} we need {quantity} {item} in {city}, thanks, {name}.",
    "Could you ship {quantity} {item} to {city}? Thanks, {name}",
    "I want to order {quantity} {item} for {day}, the address is in {city}. My name is {name}.",
    "My name is {name} and I live in {city}. Can I get {quantity} {item} on {day}?",
    "{quantity} {item} for {name} in {city}, delivery on {day} please.",
    "We are waiting for {quantity} {item} in {city}, they should come on {day}.",
    "This is {name}, my order is {quantity} {item}, please deliver on {day}.",
    "Order for {city}: {quantity} {item}. Contact is {name}.",
    "Good morning! {quantity} {item} to {city} before {day}, if you can.",
    "{name} asks for {quantity} {item}, any day is fine, deliver to {city}.",
)
NEW_WORDINGS = (
    "Hello, my name is {name}. I would like {quantity} {item} sent to {city} on {day}.",
    "Please deliver {quantity} {item} to {city} on {day}. Best wishes, {name}",
    "This is {name} from {city}, could you bring {quantity} {item} on {day}?",
    "Hi, we need {quantity} {item} in {city} by {day}.",
    "Please ship {quantity} {item} to {city}. Thanks, {name}",
    "{name} here. Can I order {quantity} {item} for {day}?",
)


def make(rng: Random, split: Split) -> Example:
    """One message with the object it means; the item stands in the plural, as in the message."""
    found = words(split)
    new = split == "heldout" and rng.random() < 0.5
    wording = rng.choice(NEW_WORDINGS if new else KNOWN_WORDINGS)
    in_words = rng.random() < 0.3
    quantity = rng.randint(2, 10 if in_words else 99)
    names = [rng.choice(found.first_names), rng.choice(found.last_names)]
    item, city = rng.choice(found.products), rng.choice(found.cities)
    if split == "train":  # few real words would be learned by heart; made-up ones can only be copied
        names = [made_up(rng).title() if rng.random() < MADE_UP_SHARE else name for name in names]
        item = made_up(rng) if rng.random() < MADE_UP_SHARE else item
        city = made_up(rng).title() if rng.random() < MADE_UP_SHARE else city
    values: dict[str, str | int] = {
        "name": " ".join(names),
        "item": plural(item),
        "quantity": quantity,
        "city": city,
        "day": rng.choice(DAYS),
    }
    facts = {field: values[field] if f"{{{field}}}" in wording else None for field in FIELDS}
    prompt = wording.format(**values | ({"quantity": NUMBER_WORDS[quantity - 2]} if in_words else {}))
    return Example(
        prompt=prompt[0].upper() + prompt[1:],
        answer=json.dumps(facts),
        facts=facts,
        wording="new" if new else "known",
    )


def check(example: Example, text: str) -> str | None:
    """Why `text` is not the wanted object, or None when it is."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
    if not isinstance(found, dict):
        return f"a JSON {type(found).__name__}, not an object"
    if set(found) != set(FIELDS):
        return f"fields {sorted(found)}, not {sorted(FIELDS)}"
    for field, wanted in example.facts.items():
        if type(found[field]) is not type(wanted) or found[field] != wanted:
            return f"{field} is {found[field]!r}, not {wanted!r}"
    return None


def made_up(rng: Random) -> str:
    """A word of two or three syllables that is no held-out value."""
    word = "".join(rng.choice(STARTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 2))) + rng.choice(ENDINGS)
    held_out = {*HELDOUT.first_names, *HELDOUT.last_names, *HELDOUT.cities, *HELDOUT.products}
    return made_up(rng) if {word, word.title()} & held_out else word


def plural(item: str) -> str:
    """Several of an item, as English writes them."""
    if item.endswith(("s", "x", "sh", "ch")):
        return f"{item}es"
    return f"{item[:-2]}ves" if item.endswith("fe") else f"{item}s"


TASK = Task(
    name="extract",
    description="Turns a delivery message into JSON: name, item, quantity, city and day, null where nothing is said.",
    instructions=(
        'Extract the order from the message as one JSON object with the keys "name", "item", "quantity" (a number), '
        '"city" and "day". Use null for what the message does not say. Answer with the JSON only.'
    ),
    make=make,
    check=check,
    max_new_tokens=64,
)
