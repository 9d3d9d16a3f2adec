"""Registries: an imitation for each test, and Debian's where it is installed, at night."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deployments.store.sources.oci.registry import DebianRegistry, ImitatedRegistry

OpenRegistry = Callable[[str], ImitatedRegistry | DebianRegistry]


@pytest.fixture
def registry() -> Iterator[ImitatedRegistry]:
    registry = ImitatedRegistry()
    yield registry
    registry.close()


@pytest.fixture(params=["imitation", pytest.param("debian", marks=pytest.mark.nightly)])
def open_registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenRegistry]:
    """Opens a registry with this kind of authorization: "" or "basic"."""
    opened: list[ImitatedRegistry | DebianRegistry] = []

    def open_one(auth: str = "") -> ImitatedRegistry | DebianRegistry:
        if request.param == "imitation":
            opened.append(ImitatedRegistry(auth))
        else:
            program = shutil.which("docker-registry")
            if program is None:
                pytest.skip("docker-registry is not installed (apt install docker-registry)")
            opened.append(DebianRegistry(program, tmp_path, auth))
        return opened[-1]

    yield open_one
    for registry in opened:
        registry.close()
