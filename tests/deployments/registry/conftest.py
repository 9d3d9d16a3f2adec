"""The registry's tests run once per database that is here; the ids of the tests and pytest's header name them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.deployments.registry.db.database import sqlite_url
from app.deployments.registry.registry import Registry
from tests.postgres import PostgresServer, find_postgres

PROGRAMS = find_postgres()
DATABASES = ["sqlite", *(["postgresql"] if PROGRAMS else [])]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    assert PROGRAMS is not None, "asked for only where it was found"
    server = PostgresServer(PROGRAMS)
    yield server
    server.stop()


@pytest.fixture(scope="session", params=DATABASES)
def shared_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests; each has a base model of its own in it, as services that share one have."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path_factory.mktemp("registry") / "shared.sqlite")
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def empty_url(shared_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A database without a schema."""
    if shared_url.startswith("sqlite"):
        return sqlite_url(tmp_path / "sub" / "empty.sqlite")
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def open_again(shared_url: str) -> Iterator[Callable[..., Registry]]:
    """The same registry, as a process after a restart opens it. Its options are `Registry`'s."""
    base_digest = secrets.token_hex(32)
    opened: list[Registry] = []

    def open_registry(**options: Any) -> Registry:
        opened.append(Registry(shared_url, base_digest, base_names=("base",), **options))
        return opened[-1]

    yield open_registry
    for registry in opened:
        registry.close()


@pytest.fixture
def registry(open_again: Callable[..., Registry]) -> Registry:
    return open_again()
