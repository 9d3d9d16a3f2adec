"""Who gets credentials, and where a registry may send the service."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.deployments.store.sources.oci.credentials import Credentials, docker_config_path, read_credentials
from app.deployments.store.sources.oci.registry_client import RegistryAccess, RegistryClient, _challenges
from app.engine.adapters.card import AdapterCard
from app.engine.errors import NotFound, SourceError, UnsafeSource
from tests.deployments.store.sources.conftest import OpenLibrary
from tests.deployments.store.sources.oci.registry import BASIC, PASSWORD, ImitatedRegistry, digest_of, push_files
from tests.deployments.store.sources.oci.test_fetcher import WEIGHTS, docker_config, fetcher
from tests.deployments.store.sources.servers import FileServer


@pytest.fixture
def other() -> Iterator[ImitatedRegistry]:
    """A second host: a token server, or a store of blobs."""
    registry = ImitatedRegistry()
    yield registry
    registry.close()


@pytest.mark.parametrize("auth", ["basic", "bearer"])
@pytest.mark.parametrize("entry", [{}, {"auth": BASIC.removeprefix("Basic ")}, {"identitytoken": "a-refresh-token"}])
def test_the_registrys_challenge_is_answered(
    tmp_path: Path,
    open_library: OpenLibrary,
    registry: ImitatedRegistry,
    files: dict[str, bytes],
    card: AdapterCard,
    auth: str,
    entry: dict[str, str],
) -> None:
    push_files(registry.host, "team/a", "v1", files)
    registry.auth = auth
    registry.seen.clear()
    library = open_library(fetcher(registry, docker_config=docker_config(tmp_path, registry, **entry)))
    uri = f"oci://{registry.host}/team/a:v1"
    if auth == "basic" and "identitytoken" in entry:
        with pytest.raises(NotFound, match=r"these credentials may not see it \(401"):
            library.from_source(uri)
        return
    assert library.from_source(uri).packed.card == card
    wanted = BASIC if auth == "basic" else "Bearer a-token"
    sent = [authorization for path, authorization in registry.seen if not path.startswith("/token")]
    assert sent == [None, *[wanted] * (len(sent) - 1)]
    if auth == "bearer":
        assert len(registry.token_forms) == 1, "one token serves the whole download"
        form = registry.token_forms[0]
        assert (form["service"], form["scope"]) == (["registry"], ["repository:x:pull"])


@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_wrong_and_missing_credentials(
    tmp_path: Path, open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes], auth: str
) -> None:
    push_files(registry.host, "a", "v1", files)
    registry.auth = auth
    uri = f"oci://{registry.host}/a:v1"
    with pytest.raises(NotFound, match=r"the registry has no .*/a, or anonymous clients may not see it \(401"):
        open_library(fetcher(registry)).from_source(uri)
    wrong = docker_config(tmp_path, registry, username="ada", password="a wrong one")
    with pytest.raises(NotFound, match=r"these credentials may not see it \(401") as caught:
        open_library(fetcher(registry, docker_config=wrong)).from_source(uri)
    assert "a wrong one" not in str(caught.value)
    wrong.write_text(json.dumps({"credsStore": "desktop", "auths": {registry.host: {}}}))
    with pytest.raises(NotFound, match="its credential helper is not run"):
        open_library(fetcher(registry, docker_config=wrong)).from_source(uri)


def test_a_password_goes_to_token_hosts_that_the_operator_named(
    tmp_path: Path,
    open_library: OpenLibrary,
    registry: ImitatedRegistry,
    other: ImitatedRegistry,
    files: dict[str, bytes],
) -> None:
    push_files(registry.host, "a", "v1", files)
    registry.auth, registry.realm = "bearer", f"http://{other.host}/token"
    config = docker_config(tmp_path, registry)
    uri = f"oci://{registry.host}/a:v1"
    with pytest.raises(UnsafeSource, match="which is not https"):
        open_library(fetcher(registry, docker_config=config)).from_source(uri)
    plain = [registry.host, other.host]
    with pytest.raises(UnsafeSource, match=f"token_hosts: \\[{other.host}\\]"):
        open_library(fetcher(registry, docker_config=config, plain_http=plain)).from_source(uri)
    assert not other.seen
    named = fetcher(registry, docker_config=config, plain_http=plain, token_hosts=[other.host])
    open_library(named).from_source(uri)
    assert [authorization for _, authorization in other.seen] == [BASIC]
    assert {authorization for _, authorization in registry.seen[-3:]} == {"Bearer a-token"}


@pytest.mark.parametrize(
    ("registry", "realm", "is_allowed"),
    [
        ("ghcr.io", "https://ghcr.io/token", True),
        ("docker.io", "https://auth.docker.io/token", True),
        ("registry.gitlab.com", "https://gitlab.com/jwt/auth", True),
        ("ghcr.io", "https://evil.io/token", False),
        ("ghcr.io", "https://ghcr.io.evil.com/token", False),
        ("registry.gitlab.com", "https://evilgitlab.com/token", False),
        ("registry.gitlab.com", "https://a.b.gitlab.com/token", False),
        ("registry.models.svc", "https://auth.models.svc/token", False),
        ("10.0.0.1:5000", "https://10.1.0.1/token", False),
        ("ghcr.io", "https://user@ghcr.io/token", False),
        ("ghcr.io", "http://ghcr.io/token", False),
        ("ghcr.io", "file:///etc/passwd", False),
        ("ghcr.io", "", False),
    ],
)
async def test_passwords_stay_in_the_registrys_domain(registry: str, realm: str, is_allowed: bool) -> None:
    asked: list[Any] = []

    class Asked(Exception):
        pass

    class Session:
        def get(self, url: Any, headers: Any, allow_redirects: bool) -> Any:
            assert not allow_redirects
            asked.append((str(url), headers))
            raise Asked

    client = RegistryClient(registry, "a/b", RegistryAccess(), Credentials("ada", "secret"))
    client._public = client._any = Session()  # type: ignore[assignment]
    with pytest.raises(Asked if is_allowed else UnsafeSource) as caught:
        await client._authorize([f'Bearer realm="{realm}",service="s"'])
    assert "secret" not in str(caught.value)
    assert len(asked) == is_allowed
    if is_allowed:
        assert asked[0][0] == f"{realm}?scope=repository:a/b:pull&service=s"


def test_blobs_may_be_in_a_store_that_the_operator_named(
    tmp_path: Path,
    open_library: OpenLibrary,
    registry: ImitatedRegistry,
    server: FileServer,
    files: dict[str, bytes],
    card: AdapterCard,
) -> None:
    push_files(registry.host, "a", "v1", files)
    path = f"/v2/a/blobs/{digest_of(files[WEIGHTS])}"
    server.files["/store/blob"] = files[WEIGHTS]
    registry.auth = "basic"
    config = docker_config(tmp_path, registry)
    uri = f"oci://{registry.host}/a:v1"

    def redirect(location: str) -> None:
        registry.answers[path] = lambda: (307, {"Location": location}, b"")

    redirect(f"{server.url}/store/blob?signature=a%2Fb+c")
    with pytest.raises(UnsafeSource, match="neither https nor below a prefix") as caught:
        open_library(fetcher(registry, docker_config=config)).from_source(uri)
    assert "signature" not in str(caught.value), "whoever has it may read the blob"
    assert not server.gets
    named = fetcher(registry, docker_config=config, redirects=(f"{server.url}/store/",))
    assert open_library(named).from_source(uri).packed.card == card
    assert server.authorizations == {"/store/blob": None}
    for location in (f"{server.url}/other/blob", f"{server.url}/store/%2e%2e/other", "http://169.254.169.254/store/"):
        redirect(location)
        with pytest.raises(UnsafeSource, match="redirects to"):
            open_library(named).from_source(uri)
    for location in ("", "http://", "ftp://host/x", f"http://u@{registry.host}/x", "http://[", "http://host:99999/"):
        redirect(location)
        with pytest.raises((UnsafeSource, SourceError)):
            open_library(named).from_source(uri)
    redirect(f"{path}?signature=x")
    with pytest.raises(SourceError, match="redirects, which may happen 5 times") as looped:
        open_library(named).from_source(uri)
    assert "signature" not in str(looped.value)
    registry.blobs["elsewhere", "1"] = files[WEIGHTS]
    redirect("/v2/elsewhere/blobs/1")
    registry.seen.clear()
    assert open_library(named).from_source(uri).packed.card == card, "within the registry, whatever the path"
    assert ("/v2/elsewhere/blobs/1", BASIC) in registry.seen


@pytest.mark.parametrize("location", ["https://169.254.169.254/x", "https://10.0.0.1/x", "https://[::1]/x"])
def test_a_redirect_to_a_private_address_is_refused(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes], location: str
) -> None:
    push_files(registry.host, "a", "v1", files)
    registry.answers[f"/v2/a/blobs/{digest_of(files[WEIGHTS])}"] = lambda: (302, {"Location": location}, b"")
    with pytest.raises(SourceError, match=r"is not public.*\{oci: \{allow_private_addresses: true\}\}"):
        open_library(fetcher(registry)).from_source(f"oci://{registry.host}/a:v1")


def test_a_public_name_with_a_private_address_is_refused(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    push_files(registry.host, "a", "v1", files)
    registry.seen.clear()
    real, host = socket.getaddrinfo, f"registry.example:{registry.host.rpartition(':')[2]}"

    def resolve(name: str, *more: Any, **named: Any) -> Any:
        return real("127.0.0.1" if name.startswith("registry.example") else name, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    registry.host = host
    with pytest.raises(SourceError, match=r"127\.0\.0\.1 is not public"):
        open_library(fetcher(registry)).from_source(f"oci://{host}/a:v1")
    assert not registry.seen
    allowed = fetcher(registry, allow_private_addresses=True)
    assert open_library(allowed).from_source(f"oci://{host}/a:v1").uri.startswith(f"oci://{host}/a@sha256:")


def test_a_token_server_does_not_redirect(
    tmp_path: Path, open_library: OpenLibrary, registry: ImitatedRegistry, server: FileServer, files: dict[str, bytes]
) -> None:
    push_files(registry.host, "a", "v1", files)
    registry.auth = "bearer"
    registry.answers["/token"] = lambda: (307, {"Location": f"{server.url}/token"}, b"")
    for entry in ({}, {"identitytoken": "a-refresh-token"}):
        library = open_library(fetcher(registry, docker_config=docker_config(tmp_path, registry, **entry)))
        with pytest.raises(SourceError, match="answered 307"):
            library.from_source(f"oci://{registry.host}/a:v1")
    assert not server.gets


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b'{"token": 1}', b'{"token": "a\\nb"}', b'{"token": ""}', bytes(2 << 20)]
)
def test_what_is_no_token(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes], answer: bytes
) -> None:
    push_files(registry.host, "a", "v1", files)
    registry.auth = "bearer"
    registry.answers["/token"] = lambda: (200, {}, answer)
    with pytest.raises(SourceError, match=r"gave no token|the token from|answered with more than"):
        open_library(fetcher(registry)).from_source(f"oci://{registry.host}/a:v1")


def test_a_manifest_is_not_redirected(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes]
) -> None:
    """A project could read another's by its own tag."""
    push_files(registry.host, "proj_b/x", "v1", files)
    registry.answers["/v2/proj_a/x/manifests/v1"] = lambda: (307, {"Location": "/v2/proj_b/x/manifests/v1"}, b"")
    with pytest.raises(SourceError, match="redirects, which may happen 0 times"):
        open_library(fetcher(registry)).from_source(f"oci://{registry.host}/proj_a/x:v1")


def test_challenges() -> None:
    bearer = {"realm": "https://a/token?x=1", "service": "s", "scope": "repository:a:pull,push"}
    text = 'Bearer realm="https://a/token?x=1",service="s",scope="repository:a:pull,push"'
    assert _challenges([text]) == {"bearer": bearer}
    assert _challenges([text.replace(",", ", ").replace("pull, push", "pull,push"), 'Basic realm="x"']) == {
        "bearer": bearer, "basic": {"realm": "x"},
    }  # fmt: skip
    assert _challenges(['Basic realm="Bearer realm=x", Bearer realm=https://a,service=s']) == {
        "basic": {"realm": "Bearer realm=x"}, "bearer": {"realm": "https://a", "service": "s"},
    }  # fmt: skip
    assert _challenges(["Basic"]) == {"basic": {}}
    assert _challenges(["", "Negotiate", 'x="1"']) == {}


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_dockers_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_credentials(path, "ghcr.io") == Credentials()
    assert docker_config_path({"DOCKER_CONFIG": str(tmp_path)}) == path
    path.write_text(json.dumps({
        "auths": {
            "ghcr.io": {"auth": encoded("ada:a:b")},
            "https://index.docker.io/v1/": {"auth": encoded("hub:x")},
            "https://quay.io": {"username": "quay", "password": "y"},
            "azurecr.io": {"auth": encoded("00000000:"), "identitytoken": "t"},
            "token.io": {"registrytoken": "r"},
            "helped.io": {},
        },
        "credHelpers": {"helped.io": "ecr-login"},
    }))  # fmt: skip
    found = {name: read_credentials(path, name) for name in
             ("ghcr.io", "docker.io", "quay.io", "azurecr.io", "token.io", "helped.io", "other.io", "io")}  # fmt: skip
    assert found == {
        "ghcr.io": Credentials("ada", "a:b"), "docker.io": Credentials("hub", "x"), "quay.io": Credentials("quay", "y"),
        "azurecr.io": Credentials("00000000", "", "t"), "token.io": Credentials(registry_token="r"),
        "helped.io": Credentials(has_helper=True), "other.io": Credentials(), "io": Credentials(),
    }  # fmt: skip
    assert "a:b" not in repr(found["ghcr.io"])


@pytest.mark.parametrize("contents", ["{", '{"auths": {"a": {"auth": "%%%"}}}', '{"auths": {"a": {"auth": "eA=="}}}'])
def test_a_malformed_configuration_is_an_error_without_its_secrets(tmp_path: Path, contents: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(contents.replace("%%%", PASSWORD))
    with pytest.raises(SourceError, match=str(path)) as caught:
        read_credentials(path, "a")
    assert PASSWORD not in str(caught.value)


def test_docker_hubs_api_has_another_host() -> None:
    assert str(RegistryClient("docker.io", "a/b", RegistryAccess(), Credentials())._origin) == (
        "https://registry-1.docker.io"
    )
