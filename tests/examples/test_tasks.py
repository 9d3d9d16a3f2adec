"""The demo tasks: the same data for the same seed, splits that share nothing, checks that tell good from bad."""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import fields, replace
from itertools import combinations
from random import SystemRandom

import pytest

from examples.training import extract, sql, support
from examples.training.recipes import RECIPES
from examples.training.task import Example, Split, Task, TaskDataError, examples
from examples.training.words import HELDOUT, TRAIN, Words

TASKS = [recipe.task for recipe in RECIPES.values()]
SPLITS: tuple[Split, ...] = ("train", "heldout")


def fresh_seed() -> int:
    """A seed no earlier run has seen; pytest shows it when an assertion fails."""
    return SystemRandom().randrange(2**32)


@pytest.fixture(params=TASKS, ids=lambda task: task.name)
def task(request: pytest.FixtureRequest) -> Task:
    """Each demo task in turn."""
    found: Task = request.param
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_same_seed_makes_same_examples(task: Task, split: Split) -> None:
    seed = fresh_seed()
    assert examples(task, split, 50, seed) == examples(task, split, 50, seed)
    assert examples(task, split, 50, seed) != examples(task, split, 50, seed + 1)


def test_first_examples_are_pinned() -> None:
    """The committed adapters were trained on exactly this data; a change here means training them again."""
    first = {task.name: examples(task, "train", 1, 0)[0].prompt for task in TASKS}
    assert first == {
        "sql": "Count the returned orders of 2013.",
        "extract": "Good morning! 14 guitars to Griota before Sunday, if you can.",
        "support": "GR-81384, Miguel: where is the clock I ordered.",
        "tools": "Get me Ben Dalton on the phone.",
    }


@pytest.mark.parametrize("field", [field.name for field in fields(Words)])
def test_splits_share_no_value(field: str) -> None:
    train, heldout = getattr(TRAIN, field), getattr(HELDOUT, field)
    assert len(train) == len(set(train)) > len(heldout) == len(set(heldout)) > 0
    assert not set(train) & set(heldout)


def test_splits_share_no_prompt(task: Task) -> None:
    train = {example.prompt for example in examples(task, "train", 1000, fresh_seed())}
    heldout = examples(task, "heldout", 100, fresh_seed())
    shared = train & {example.prompt for example in heldout}
    # A question made of fixed words only ("How many orders are shipped?") has no value that could differ.
    fixed = {prompt for prompt in shared if not any(value in prompt for value in _values(HELDOUT))}
    assert shared == fixed
    assert {example.wording for example in heldout} == {"known", "new"}


def test_train_never_shows_a_heldout_value(task: Task) -> None:
    values = [
        value for value in _values(HELDOUT) if task.name == "sql" or not value.isdigit()
    ]  # a ticket may be AB-2014
    heldout = re.compile("|".join(rf"\b{re.escape(value)}s?\b" for value in values))
    for example in examples(task, "train", 1500, fresh_seed()):
        assert heldout.search(f"{example.prompt} {example.answer}") is None, example


def test_wanted_answer_passes_and_another_fails(task: Task) -> None:
    found = examples(task, "heldout", 40, fresh_seed()) + examples(task, "train", 30, fresh_seed())
    assert [task.check(example, example.answer) for example in found] == [None] * len(found)
    pairs = [(one, other) for one, other in combinations(found, 2) if one.answer != other.answer]
    confused = [(one.prompt, other.answer) for one, other in pairs if task.check(one, other.answer) is None]
    assert len(pairs) > 1000
    # Two different counts can be the same number; the shop is filled so that this is rare.
    assert len(confused) <= (len(pairs) // 100 if task.name == "sql" else 0), confused


@pytest.mark.parametrize("bad", ["", "Sure!", "null", "[]", "SELECT 1;", "{}", "\n\n"])
def test_nonsense_fails(task: Task, bad: str) -> None:
    for example in examples(task, "heldout", 5, fresh_seed()):
        assert task.check(example, bad) is not None
        assert task.check(example, f"Here it is: {example.answer}") is not None


def test_too_many_examples_are_refused(task: Task) -> None:
    narrow = replace(task, make=lambda rng, split: task.make(type(rng)(0), split))
    with pytest.raises(TaskDataError, match=r"made 1 different prompts .* but 2 were asked for"):
        examples(narrow, "train", 2, 0)


# sql


def test_every_intent_has_rows_for_every_heldout_value() -> None:
    """An empty result would let a wrong query pass."""
    connection = sql.build_database()
    for example in examples(sql.TASK, "heldout", 300, fresh_seed()):
        rows = sql.run_query(connection, example.answer)
        assert rows, example
        assert rows != [(None,)], example
        assert rows != [(0,)], example


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM orders",
        "DROP TABLE customers",
        "INSERT INTO customers VALUES (1, 'x', 'y', 1)",
        "ATTACH DATABASE 'x' AS y",
        "PRAGMA query_only = OFF",
        "SELECT 1; SELECT 2",
        "SELECT COUNT(*) FROM orders a, orders b, orders c",
    ],
)
def test_only_bounded_reads_run(query: str) -> None:
    connection = sql.build_database()
    with pytest.raises(sqlite3.Error):
        sql.run_query(connection, query)
    assert sql.run_query(connection, "SELECT COUNT(*) FROM orders") == [(4000,)]


def test_sql_spelling_is_free_but_order_counts() -> None:
    query = "SELECT name FROM customers WHERE city = 'Berlin' ORDER BY name;"
    example = Example("?", query, {"query": query, "ordered": 1}, "known")
    assert sql.check(example, "select c.name from customers as c where c.city='Berlin' order by 1") is None
    assert sql.check(example, query.replace("name;", "name DESC;")) is not None
    unordered = replace(example, facts={"query": query, "ordered": 0})
    assert sql.check(unordered, query.replace("name;", "name DESC;")) is None


# extract


@pytest.mark.parametrize("field", extract.FIELDS)
def test_each_wrong_field_fails(field: str) -> None:
    for example in examples(extract.TASK, "heldout", 20, fresh_seed()):
        wanted = json.loads(example.answer)
        missing = {key: value for key, value in wanted.items() if key != field}
        for bad in (wanted | {field: "other"}, missing, wanted | {"extra": 1}, [wanted]):
            assert extract.check(example, json.dumps(bad)) is not None
        assert extract.check(example, json.dumps(dict(reversed(wanted.items())), indent=2)) is None


def test_quantity_must_be_an_integer() -> None:
    example = examples(extract.TASK, "heldout", 1, fresh_seed())[0]
    wanted = json.loads(example.answer)
    for bad in (str(wanted["quantity"]), float(wanted["quantity"])):
        assert extract.check(example, json.dumps(wanted | {"quantity": bad})) is not None


# support


def test_each_part_of_the_style_is_needed() -> None:
    for example in examples(support.TASK, "heldout", 20, fresh_seed()):
        name, ticket, product, step = (str(example.facts[key]) for key in ("name", "ticket", "product", "step"))
        other_step = next(problem.step for problem in support.PROBLEMS if problem.step != step)
        changed = {
            "greeting": example.answer.replace(f"Hello {name}!", "Hi!"),
            "ticket": example.answer.replace(ticket, "ZZ-1"),
            "second ticket": example.answer.replace(ticket, f"{ticket} and ZZ-1"),
            "product": example.answer.replace(product, "thing"),
            "step": example.answer.replace(step, other_step),
            "both steps": example.answer.replace(step, f"{step} and {other_step}"),
            "sign-off": example.answer.replace(support.SIGN_OFF, "Bye"),
            "length": example.answer.replace("Thank you", "Thank you " + "so much " * 40),
        }
        passed = [part for part, text in changed.items() if support.check(example, text) is None]
        assert passed == [], example


def _values(words: Words) -> list[str]:
    return [str(value) for field in fields(words) for value in getattr(words, field.name)]
