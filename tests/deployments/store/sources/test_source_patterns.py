"""A project loads what the operator's patterns have for its id, and nothing else, with no credentials but its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import AdaptersConfig, load_config
from app.deployments.ingress.principal import Principal, load_request
from app.deployments.store.adapter_reader import open_sources
from app.deployments.store.sources.hub import HubFetcher
from app.deployments.store.sources.urls import UrlFetcher
from app.deployments.tenancy.models import Tenant
from app.engine.errors import ConfigError, NotFound, SourceError, UnsafeSource
from tests.deployments.store.sources.conftest import OpenLibrary, new_adapter
from tests.deployments.store.sources.servers import FileServer, HubServer

A = Principal("proj_a", "key", Tenant("proj_a", "A", 0.0), kind="project")
PATTERNS = AdaptersConfig(
    urls=("s3://adapters/{tenant}/", "s3://own-{tenant}/x/", "https://host/shared/", "https://host/{tenant}/{tenant}/"),
    hub=("our-org/{tenant}-*", "open-org/*"),
)


def check(caller: Principal, source: str, adapters: AdaptersConfig = PATTERNS) -> None:
    load_request(caller, "x", source, adapters=adapters)


@pytest.mark.parametrize(
    "source",
    ["s3://adapters/proj_a/x", "s3://own-proj_a/x/y", "https://host/shared/x", "https://host/proj_a/proj_a/x",
     "hf://our-org/proj_a-sql@main", "hf://open-org/any@main", "proj_a/x"],
)  # fmt: skip
def test_what_is_for_every_project_or_for_this_one_may_be_loaded(source: str) -> None:
    check(A, source)


@pytest.mark.parametrize(
    "source",
    ["s3://adapters/proj_b/x", "s3://own-proj_b/x/y", "https://host/proj_b/proj_b/x", "s3://adapters/proj_ab/x",
     "hf://our-org/proj_b-sql@main", "hf://our-org/proj_ab@main", "hf://our-org/xproj_a-b@main", "hf://other/x@main",
     "hf://our-org/proj_a-x/y@main", "proj_b/x", "x"],
)  # fmt: skip
def test_what_is_another_projects_is_refused(source: str) -> None:
    with pytest.raises(UnsafeSource):
        check(A, source)
    if source != "x":
        check(A._replace(kind="admin"), source)


def test_projects_have_the_hub_only_where_the_operator_allows_it() -> None:
    with pytest.raises(UnsafeSource, match=r"adapters\.hub"):
        check(A, "hf://org/name@main", AdaptersConfig())
    check(Principal("default", "http"), "hf://org/name@main", AdaptersConfig())
    check(A, "hf://org/name@main", AdaptersConfig(hub=("*/*",)))


def test_the_service_reads_what_some_pattern_allows(tmp_path: Path) -> None:
    sources = open_sources(PATTERNS, {}, base_name="base")
    for allowed in ("s3://adapters/proj_b/x", "https://host/p/p/x", "hf://our-org/proj_b-x@main"):
        sources.locate(allowed)
    for refused in ("s3://adapters/x", "s3://own-/x/y", "https://host/p/q/x", "hf://other/x@main", "s3://own-a/b/x/y"):
        with pytest.raises(UnsafeSource):
            sources.locate(refused)
    resolved = AdaptersConfig(hub=(), resolvers=("hf://org/{name}@main",))
    with pytest.raises(UnsafeSource):
        open_sources(resolved, {}, base_name="base").locate("hf://org/x@main")
    for bad in ({"hub": ["org"]}, {"hub": ["a/b/c"]}, {"urls": ["s3://b/{name}/"]}, {"hub": ["org/{name}-"]}):
        with pytest.raises(ConfigError):
            load_config({"adapters": {"roots": [str(tmp_path)]} | bad})


def test_the_operators_token_is_for_what_the_operator_named(tmp_path: Path, hub: HubServer) -> None:
    patterns = {"patterns": ("org/{tenant}-*", "open/*"), "resolved": ("named/*",)}
    fetcher = HubFetcher(hub.url, "hf_operators", max_bytes=1 << 20, timeout_s=120, **patterns)
    files, _ = new_adapter(tmp_path / "one")
    uses = {}
    for repo in ("org/proj_a-x", "org/proj_b-x", "open/x", "named/x"):
        commit = hub.commit(repo, "main", files)
        for tenant_id in ("proj_a", "default"):
            hub.authorizations.clear()
            folder = tmp_path / f"{repo.replace('/', '-')}-{tenant_id}"
            folder.mkdir()
            assert fetcher.fetch(f"hf://{repo}@main", folder, tenant_id) == f"hf://{repo}@{commit}"
            (uses[repo, tenant_id],) = set(hub.authorizations.values())
    token = "Bearer hf_operators"
    assert {key for key, sent in uses.items() if sent == token} == {
        ("org/proj_a-x", "proj_a"), ("named/x", "proj_a"),
        *((repo, "default") for repo in ("org/proj_a-x", "org/proj_b-x", "open/x", "named/x")),
    }  # fmt: skip
    assert {sent for sent in uses.values() if sent != token} == {None}


def test_a_projects_own_token_is_used_for_it_and_for_no_other(tmp_path: Path, hub: HubServer) -> None:
    fetcher = HubFetcher(
        hub.url,
        "hf_operators",
        max_bytes=1 << 20,
        timeout_s=120,
        patterns=("org/{tenant}-*", "open/*"),
        own_token={"proj_a": "hf_own"}.get,
    )
    files, _ = new_adapter(tmp_path / "one")
    sent = {}
    for repo, tenant_id in (
        ("org/proj_a-x", "proj_a"), ("open/x", "proj_a"), ("org/proj_b-x", "proj_b"), ("open/x", "proj_b"),
        ("open/x", "default"),
    ):  # fmt: skip
        hub.commit(repo, "main", files)
        hub.authorizations.clear()
        folder = tmp_path / f"{repo.replace('/', '-')}-{tenant_id}"
        folder.mkdir()
        fetcher.fetch(f"hf://{repo}@main", folder, tenant_id)
        (sent[repo, tenant_id],) = set(hub.authorizations.values())
    assert sent == {
        ("org/proj_a-x", "proj_a"): "Bearer hf_own",
        ("open/x", "proj_a"): "Bearer hf_own",
        ("org/proj_b-x", "proj_b"): "Bearer hf_operators",
        ("open/x", "proj_b"): None,
        ("open/x", "default"): "Bearer hf_operators",
    }


def test_a_redirect_stays_with_its_project(open_library: OpenLibrary, server: FileServer, tmp_path: Path) -> None:
    files, card = new_adapter(tmp_path / "one")
    for name, contents in files.items():
        server.files |= {f"/{tenant}/x/{name}": contents for tenant in ("proj_a", "proj_b")}

    def answer(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/proj_a/moved/"):
            return 302, {"Location": path.replace("moved", "x")}, b""
        if path.startswith("/proj_a/stolen/"):
            return 302, {"Location": path.replace("proj_a/stolen", "proj_b/x")}, b""
        return server._file(method, path)

    server.answer = answer
    fetcher = UrlFetcher((f"{server.url}/{{tenant}}/",), options={}, max_bytes=1 << 20, timeout_s=120)
    library = open_library(fetcher)
    assert library.from_source(f"{server.url}/proj_a/moved").packed.card == card
    with pytest.raises((UnsafeSource, SourceError), match="redirects"):
        library.from_source(f"{server.url}/proj_a/stolen")
    assert not [path for path in server.gets if path.startswith("/proj_b")]
    with pytest.raises(NotFound):
        library.from_source(f"{server.url}/proj_a/none")
