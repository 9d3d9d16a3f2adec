"""`gs://` against an imitation of Google's storage: its contents, its errors, and credentials that never come."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from app.deployments.store.sources.fetch_timeout import FetchTimeout
from app.deployments.store.sources.source_resolution import Sources
from app.deployments.store.sources.urls import UrlFetcher
from app.engine.adapters.adapter_tokenizer import TEXT_FILES
from app.engine.adapters.card import AdapterCard
from app.engine.errors import AdapterTooLarge, NotFound, SourceError, UnsafeSource
from tests.deployments.store.sources.conftest import OpenLibrary
from tests.deployments.store.sources.servers import GoogleStorage

LIMIT = 1 << 20


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> Iterator[GoogleStorage]:
    """A bucket "adapters" with `team/a`; this machine's own credentials are out of reach."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    storage = GoogleStorage()
    storage.files = {f"/adapters/team/a/{name}": contents for name, contents in files.items()}
    yield storage
    storage.close()


def bucket(storage: GoogleStorage, timeout_s: float = 60.0, **options: object) -> UrlFetcher:
    return UrlFetcher(
        ["gs://adapters/team/", f"{storage.url}/"],
        options={"gs": {"endpoint_url": storage.url} | options},
        max_bytes=LIMIT,
        timeout_s=timeout_s,
    )


def object_path(name: str) -> str:
    return f"/download/storage/v1/b/adapters/o/team/a/{name}"


@pytest.fixture
def credentials(tmp_path: Path, storage: GoogleStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service account whose tokens `storage` gives."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    account = {
        "type": "service_account",
        "project_id": "p",
        "private_key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
        "client_email": "reader@p.iam.gserviceaccount.com",
        "token_uri": f"{storage.url}/token",
    }
    file = tmp_path / "account.json"
    file.write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))


def test_a_public_bucket(
    open_library: OpenLibrary, storage: GoogleStorage, files: dict[str, bytes], card: AdapterCard
) -> None:
    """No credentials are configured or found: the objects are asked for by nobody in particular."""
    library = open_library(bucket(storage))
    located = library.from_source("gs://adapters/team/a")
    assert (located.uri, located.packed.card) == ("gs://adapters/team/a", card)
    assert set(storage.gets) == {object_path(name) for name in {*files, *TEXT_FILES}}, "nothing else was asked for"
    assert set(storage.authorizations.values()) == {None}
    assert library.from_disk(card.digest, located.uri) is not None
    with pytest.raises(NotFound, match="gs://adapters/team/none"):
        library.from_source("gs://adapters/team/none")
    with pytest.raises(UnsafeSource):
        library.from_source("gs://private/team/a")
    storage.files["/adapters/team/a/adapter_model.safetensors"] = bytes(LIMIT + 1)
    with pytest.raises(AdapterTooLarge, match=str(LIMIT)):
        library.from_source("gs://adapters/team/a")
    storage.answer = lambda *_: (403, {}, b'{"error": {"code": 403, "message": "no such right"}}')
    with pytest.raises(SourceError, match="no such right"):
        library.from_source("gs://adapters/team/a")


@pytest.mark.usefixtures("credentials")
def test_the_environments_credentials(open_library: OpenLibrary, storage: GoogleStorage, card: AdapterCard) -> None:
    assert open_library(bucket(storage)).from_source("gs://adapters/team/a").packed.card == card
    assert set(storage.authorizations.values()) == {"Bearer a-token"}


def test_credentials_that_were_asked_for_and_are_not_there(open_library: OpenLibrary, storage: GoogleStorage) -> None:
    with pytest.raises(SourceError, match="credentials were not found"):
        open_library(bucket(storage, token="google_default")).from_source("gs://adapters/team/a")
    assert not storage.gets, "not tried without them"


@pytest.mark.usefixtures("credentials")
def test_credentials_that_never_come_delay_their_own_source_only(
    open_library: OpenLibrary, storage: GoogleStorage, files: dict[str, bytes], card: AdapterCard
) -> None:
    storage.gates["/token"] = threading.Event()
    short = FetchTimeout(bucket(storage), 0.3)
    with pytest.raises(SourceError, match=r"gs://adapters/team/a was not fetched within adapters.source_timeout_s 0.3"):
        open_library(short).from_source("gs://adapters/team/a")
    storage.answer = storage._file
    storage.files |= {f"/web/{name}": contents for name, contents in files.items()}
    assert open_library(bucket(storage)).from_source(f"{storage.url}/web").packed.card == card


@pytest.mark.parametrize("path", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_object_that_never_comes(open_library: OpenLibrary, storage: GoogleStorage, path: str) -> None:
    storage.gates[object_path(path)] = threading.Event()
    with pytest.raises(SourceError, match="gs://adapters/team/a"):
        open_library(bucket(storage, timeout_s=1.0, token="anon")).from_source("gs://adapters/team/a")


def test_a_storage_that_only_fails_is_given_up(open_library: OpenLibrary, storage: GoogleStorage) -> None:
    """gcsfs asks again after 503, for longer than the time there is."""
    storage.answer = lambda *_: (503, {}, b"")
    with pytest.raises(SourceError):
        open_library(bucket(storage, timeout_s=1.0, token="anon")).from_source("gs://adapters/team/a")


class Stuck:
    """A source that answers when it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[str] = []

    def accepts(self, uri: str) -> bool:
        return uri.startswith("models://")

    def fetch(self, uri: str, folder: Path, tenant_id: str) -> str:  # noqa: ARG002
        self.asked.append(uri)
        assert self.gate.wait(600)
        return uri


def test_a_source_that_hangs_is_left_alone_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.deployments.store.sources.fetch_timeout.MAX_HANGING", 2)
    stuck = Stuck()
    sources = Sources([tmp_path], [FetchTimeout(stuck, 0.05)])
    fetch = lambda uri: sources.locate(uri).fetch(tmp_path)  # type: ignore[union-attr]  # noqa: E731
    for _ in range(2):
        with pytest.raises(SourceError, match=r"within adapters.source_timeout_s 0.05"):
            fetch("models://a/x")
    with pytest.raises(SourceError, match="models://a/y is not fetched: 2 earlier fetches from models://a"):
        fetch("models://a/y")
    deadline_s = time.monotonic() + 600
    while len(stuck.asked) < 2:  # the caller's time may be up before its thread has begun
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    assert len(stuck.asked) == 2
    with pytest.raises(SourceError, match="within"):
        fetch("models://b/x")
    stuck.gate.set()
    patient = Sources([tmp_path], [FetchTimeout(stuck, 600.0)])
    place = patient.locate("models://a/z")
    assert place.fetch(tmp_path) == "models://a/z"  # type: ignore[union-attr]
    for thread in threading.enumerate():
        if thread.name == "may-hang":
            thread.join(600)
    assert not +sources._fetchers[0]._hanging_calls._hanging  # type: ignore[attr-defined]
