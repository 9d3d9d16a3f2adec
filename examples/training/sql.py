"""Text to SQL for one shop: questions, the query that each one means, and a check that runs the answer.

The answer is one SQLite SELECT on the two tables below. It passes when it runs read-only on the seeded database and
returns the wanted rows, in order if the question specifies one; its spelling does not matter. The prompt does not
contain the schema: the adapter has learned it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from functools import cache
from random import Random

from examples.training.task import Example, Split, Task
from examples.training.words import HELDOUT, TRAIN, words

SCHEMA = (
    "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, since INTEGER);\n"
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, product TEXT, quantity INTEGER, price REAL, "
    "status TEXT, year INTEGER);\n"
)
STATUSES = ("pending", "shipped", "delivered", "cancelled", "returned")
MAX_STEPS = 2_000_000  # SQLite virtual machine steps; the wanted queries need under 50,000


@dataclass(frozen=True)
class Intent:
    """One meaning: its query, the wordings to train on, and wordings only the held-out split uses."""

    query: str
    train: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the question asks for an order of rows."""
        return "ORDER BY" in self.query


JOIN = "FROM orders JOIN customers ON orders.customer_id = customers.id"
INTENTS = (
    Intent(
        "SELECT COUNT(*) FROM customers WHERE city = '{city}';",
        (
            "How many customers live in {city}?",
            "Count the customers in {city}.",
            "What is the number of customers from {city}?",
            "How many of our customers are in {city}?",
        ),
        ("Number of customers based in {city}?", "Tell me how many customers are from {city}."),
    ),
    Intent(
        "SELECT name FROM customers WHERE city = '{city}' ORDER BY name;",
        (
            "List the names of customers in {city} in alphabetical order.",
            "Which customers live in {city}? Sort them by name.",
            "Show the customers from {city}, sorted by name.",
            "Names of all customers in {city}, alphabetically.",
        ),
        ("Give me the customers living in {city}, sorted by name.", "List customers from {city} alphabetically."),
    ),
    Intent(
        "SELECT COUNT(*) FROM customers WHERE since > {year};",
        (
            "How many customers joined after {year}?",
            "Count the customers who joined after {year}.",
            "What is the number of customers who signed up after {year}?",
            "How many people became customers after {year}?",
        ),
        ("Number of customers who joined later than {year}?", "Tell me how many customers signed up after {year}."),
    ),
    Intent(
        "SELECT COUNT(*) FROM orders WHERE status = '{status}';",
        (
            "How many orders are {status}?",
            "Count the {status} orders.",
            "What is the number of {status} orders?",
            "How many {status} orders do we have?",
        ),
        ("Number of orders that are {status}?", "Tell me how many orders are {status}."),
    ),
    Intent(
        "SELECT COUNT(*) FROM orders WHERE status = '{status}' AND year = {year};",
        (
            "How many orders from {year} are {status}?",
            "Count the {status} orders of {year}.",
            "What is the number of {status} orders in {year}?",
            "How many {status} orders do we have from {year}?",
        ),
        ("Number of {status} orders from {year}?", "Tell me how many orders of {year} are {status}."),
    ),
    Intent(
        "SELECT SUM(quantity) FROM orders WHERE product = '{product}';",
        (
            "How many units of {product} were sold?",
            "What is the total quantity of {product} ordered?",
            "Total units sold of {product}?",
            "How many pieces of {product} have been ordered?",
        ),
        ("Total quantity sold of {product}?", "Tell me how many units of {product} were ordered."),
    ),
    Intent(
        "SELECT SUM(quantity * price) FROM orders WHERE product = '{product}';",
        (
            "What is the revenue from {product}?",
            "How much money did we make with {product}?",
            "Total revenue for {product}?",
            "How much revenue did {product} bring in?",
        ),
        ("Revenue of {product}, please.", "How much money came in from {product}?"),
    ),
    Intent(
        "SELECT SUM(quantity * price) FROM orders WHERE year = {year};",
        (
            "What was the revenue in {year}?",
            "How much money did we make in {year}?",
            "Total revenue for the year {year}?",
            "How much revenue did {year} bring in?",
        ),
        ("Revenue of the year {year}, please.", "How much money came in during {year}?"),
    ),
    Intent(
        "SELECT MAX(price) FROM orders WHERE product = '{product}';",
        (
            "What is the highest price paid for {product}?",
            "What is the maximum price of {product}?",
            "What was the most expensive {product}?",
            "Highest price of {product}?",
        ),
        ("Maximum price paid for {product}?", "Tell me the highest price for {product}."),
    ),
    Intent(
        "SELECT AVG(price) FROM orders WHERE product = '{product}';",
        (
            "What is the average price of {product}?",
            "What does {product} cost on average?",
            "Average price paid for {product}?",
            "How much is {product} on average?",
        ),
        ("Mean price of {product}?", "Tell me the average price for {product}."),
    ),
    Intent(
        f"SELECT DISTINCT orders.product {JOIN} WHERE customers.name = '{{name}}';",
        (
            "Which products did {name} order?",
            "What did {name} buy?",
            "List the products ordered by {name}.",
            "Show everything that {name} has bought.",
        ),
        ("Which products has {name} bought?", "List what {name} ordered."),
    ),
    Intent(
        f"SELECT SUM(orders.quantity * orders.price) {JOIN} WHERE customers.name = '{{name}}';",
        (
            "How much has {name} spent?",
            "What is the total spending of {name}?",
            "How much money did {name} spend with us?",
            "Total amount spent by {name}?",
        ),
        ("Total spent by {name}?", "Tell me how much {name} spent."),
    ),
    Intent(
        f"SELECT COUNT(*) {JOIN} WHERE customers.city = '{{city}}' AND orders.status = '{{status}}';",
        (
            "How many {status} orders come from {city}?",
            "Count the {status} orders of customers in {city}.",
            "How many orders from {city} are {status}?",
            "What is the number of {status} orders from {city}?",
        ),
        ("Number of {status} orders from {city}?", "Tell me how many orders from {city} are {status}."),
    ),
    Intent(
        "SELECT product, SUM(quantity) AS total FROM orders GROUP BY product ORDER BY total DESC LIMIT {n};",
        (
            "What are the {n} best selling products?",
            "Show the top {n} products by quantity sold.",
            "List the {n} products that sold the most units.",
            "Which {n} products sell best?",
        ),
        ("Top {n} products by units sold?", "Tell me the {n} best selling products."),
    ),
    Intent(
        "SELECT status, COUNT(*) FROM orders WHERE product = '{product}' GROUP BY status;",
        (
            "How many {product} orders are there per status?",
            "Count the orders of {product} by status.",
            "Number of {product} orders for each status?",
            "Show the order count per status for {product}.",
        ),
        ("Count {product} orders per status.", "Show how many {product} orders there are for each status."),
    ),
    Intent(
        "SELECT city, COUNT(*) FROM customers WHERE since > {year} GROUP BY city;",
        (
            "How many customers per city joined after {year}?",
            "Count the customers who joined after {year} by city.",
            "Number of customers since {year} for each city, not counting {year} itself?",
            "Show the count per city of customers who signed up after {year}.",
        ),
        ("Count customers per city who joined after {year}.", "For each city, how many customers joined after {year}?"),
    ),
)


def customer_names(split: Split) -> tuple[str, ...]:
    """Full names that are in the database, made of one split's first and last names only."""
    found = words(split)
    return tuple(f"{first} {found.last_names[i % len(found.last_names)]}" for i, first in enumerate(found.first_names))


def build_database() -> sqlite3.Connection:
    """A fresh in-memory shop with every value of both splits in it, seeded, then made read-only."""
    rng = Random("shop")
    connection = sqlite3.connect(":memory:", cached_statements=0)  # a reused statement keeps its step count
    connection.executescript(SCHEMA)
    cities = TRAIN.cities + HELDOUT.cities
    products = TRAIN.products + HELDOUT.products
    years = sorted(TRAIN.years + HELDOUT.years)
    names = customer_names("train") + customer_names("heldout")
    homes = [city for i, city in enumerate(cities) for _ in range(i + 2)]  # no two cities have the same count
    rng.shuffle(homes)
    for i, city in enumerate(homes):
        name = names[i] if i < len(names) else f"Guest {i:04d}"
        connection.execute("INSERT INTO customers VALUES (?, ?, ?, ?)", (i + 1, name, city, rng.choice(years)))
    for i in range(4000):
        customer = i % len(homes) + 1
        price = round(rng.uniform(5, 300), 2)
        order = (i + 1, customer, rng.choice(products), rng.randint(1, 9), price, rng.choice(STATUSES))
        connection.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?, ?)", (*order, rng.choice(years)))
    connection.execute("PRAGMA query_only = ON")
    return connection


def run_query(connection: sqlite3.Connection, query: str) -> list[tuple[object, ...]]:
    """Rows of one SELECT, floats rounded to cents. Raises sqlite3.Error on anything else or past MAX_STEPS."""
    connection.set_authorizer(_only_reads)
    connection.set_progress_handler(lambda: 1, MAX_STEPS)
    rows = connection.execute(query).fetchall()
    return [tuple(round(cell, 2) if isinstance(cell, float) else cell for cell in row) for row in rows]


def make(rng: Random, split: Split) -> Example:
    """One question with the query it means."""
    found = words(split)
    intent = rng.choice(INTENTS)
    new = split == "heldout" and rng.random() < 0.5
    question = rng.choice(intent.new if new else intent.train)
    name = f"{rng.choice(found.first_names)} {rng.choice(found.last_names)}"  # any pair teaches copying
    values = {
        "city": rng.choice(found.cities),
        "name": name if split == "train" else rng.choice(customer_names(split)),
        "product": rng.choice(found.products),
        "year": rng.choice(found.years),
        "status": rng.choice(STATUSES),
        "n": rng.randint(2, 9),
    }
    query = intent.query.format(**values)
    return Example(
        prompt=question.format(**values),
        answer=query,
        facts={"query": query, "ordered": int(intent.is_ordered)},
        wording="new" if new else "known",
    )


def check(example: Example, text: str) -> str | None:
    """Why `text` is not a query with the wanted rows, or None when it is."""
    connection = _database()
    wanted = run_query(connection, str(example.facts["query"]))
    try:
        rows = run_query(connection, text.strip())
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"sqlite3: {error}"
    if not example.facts["ordered"]:
        wanted, rows = sorted(wanted, key=repr), sorted(rows, key=repr)
    return None if rows == wanted else f"{len(rows)} rows, not the wanted {len(wanted)} rows"


def _only_reads(action: int, *_: object) -> int:
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
    return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY


@cache
def _database() -> sqlite3.Connection:
    return build_database()


TASK = Task(
    name="sql",
    description="Answers questions about a small shop with one SQLite query over its customers and orders tables.",
    instructions=(
        "Answer with one SQLite query and nothing else. The tables are:\n"
        + SCHEMA
        + "status is one of "
        + ", ".join(STATUSES)
        + "."
    ),
    make=make,
    check=check,
    max_new_tokens=64,
)
