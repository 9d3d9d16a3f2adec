"""A source that sends half a file gives no adapter, and the next attempt starts from nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.deployments.store.sources.hub import HubFetcher
from app.engine.adapters.card import AdapterCard
from app.engine.errors import AdapterFormatError, SourceError
from tests.deployments.store.sources.conftest import OpenLibrary
from tests.deployments.store.sources.servers import FileServer, HubServer
from tests.deployments.store.sources.test_sources import LIMIT, serve, urls

WEIGHTS = "adapter_model.safetensors"


def send_half(server: FileServer, *, is_announced: bool = True) -> None:
    """End the connection after half of the weights' file; `is_announced`: the header gives the whole file's length."""
    whole = server.answer

    def half(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = whole(method, path)
        if not path.endswith(WEIGHTS):
            return status, headers, body
        length = headers.get("Content-Length", str(len(body))) if is_announced else str(len(body) // 2)
        return status, headers | {"Content-Length": length, "Connection": "close"}, body[: len(body) // 2]

    server.answer = half


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_web_server_that_sends_half_a_file(
    tmp_path: Path,
    open_library: OpenLibrary,
    server: FileServer,
    files: dict[str, bytes],
    card: AdapterCard,
    is_announced: bool,
) -> None:
    serve(server, "/a", files)
    whole = server.answer
    send_half(server, is_announced=is_announced)
    library = open_library(urls(f"{server.url}/"))
    with pytest.raises(SourceError if is_announced else AdapterFormatError):
        library.from_source(f"{server.url}/a")
    assert not list((tmp_path / "disk" / "objects").iterdir())
    assert not list((tmp_path / "disk" / "staging").glob("*/*"))
    server.answer = whole
    assert library.from_source(f"{server.url}/a").packed.card == card


def test_a_hub_that_sends_half_a_file(
    tmp_path: Path, open_library: OpenLibrary, hub: HubServer, files: dict[str, bytes], card: AdapterCard
) -> None:
    hub.commit("org/name", "main", files)
    library, whole = open_library(HubFetcher(hub.url, None, max_bytes=LIMIT, timeout_s=120)), hub.answer
    send_half(hub)
    with pytest.raises(SourceError):
        library.from_source("hf://org/name@main")
    assert not list((tmp_path / "disk" / "objects").iterdir())
    hub.answer = whole
    assert library.from_source("hf://org/name@main").packed.card == card
