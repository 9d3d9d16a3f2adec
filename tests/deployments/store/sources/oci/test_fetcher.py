"""An adapter comes out of a registry as it went in, in every layout, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.deployments.registry.models import check_source
from app.deployments.store.adapter_reader import open_sources
from app.deployments.store.sources.oci.fetcher import OciFetcher
from app.deployments.store.sources.resolvers import TemplateResolver
from app.deployments.store.sources.source_resolution import RemoteSource, Reserve, Sources, unbounded
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.formats.arrow import CARD_SUFFIX, ArrowCard, write_card
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.errors import (
    AdapterFormatError,
    AdapterTooLarge,
    ConfigError,
    InvalidRequest,
    NotFound,
    SourceError,
    UnsafeSource,
)
from tests.deployments.store.sources.conftest import SPEC, OpenLibrary, new_adapter
from tests.deployments.store.sources.oci.conftest import OpenRegistry
from tests.deployments.store.sources.oci.registry import (
    FILE,
    PASSWORD,
    TITLE,
    USER,
    DebianRegistry,
    ImitatedRegistry,
    digest_of,
    push,
    push_blob,
    push_files,
    push_manifest,
    tar,
)

LIMIT = 1 << 20
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CNCF, KIT = "application/vnd.cncf.model.", "application/vnd.kitops.modelkit."


def fetcher(
    registry: ImitatedRegistry | DebianRegistry,
    *,
    prefix: str = "",
    timeout_s: float = 120.0,
    reserve: Reserve = unbounded,
    docker_config: Path = Path("/nowhere/config.json"),
    redirects: tuple[str, ...] = (),
    **options: Any,
) -> OciFetcher:
    return OciFetcher(
        [f"oci://{registry.host}/{prefix}"],
        options={"plain_http": [registry.host]} | options,
        redirects=redirects,
        docker_config=docker_config,
        max_bytes=LIMIT,
        timeout_s=timeout_s,
        reserve=reserve,
    )


def docker_config(folder: Path, registry: ImitatedRegistry | DebianRegistry, **entry: str) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"auths": {registry.host: entry or {"username": USER, "password": PASSWORD}}}))
    return path


@pytest.mark.parametrize(
    "source",
    ["oci://host/ok/a:v1", "oci://host:5000/ok/a/b:v1", "oci://host/ok/a@sha256:" + "0" * 64,
     "oci://host/ok/a:v1@sha256:" + "0" * 64],
)  # fmt: skip
def test_references_under_a_prefix_are_sources(tmp_path: Path, source: str) -> None:
    config = load_config({"adapters": {"roots": [str(tmp_path)], "urls": ["oci://host/ok/", "oci://host:5000/ok/"]}})
    sources = open_sources(config.adapters, {}, base_name="base")
    check_source(source)
    assert isinstance(sources.locate(source), RemoteSource)
    assert sources.lane(source) in ("oci://host", "oci://host:5000")


@pytest.mark.parametrize(
    "source",
    ["oci://host/a:v1", "oci://other/ok/a:v1", "oci://host/ok/../a:v1", "oci://host:80/ok/a:v1", "oci://u@host/ok/a:v1",
     "oci://host/ok/a:v1?x", "oci://host/ok/a:v/1", "oci://host/ok/a:", "https://host/ok/a:b",
     "oci://host/ok/a:v1:v2", "oci://host/ok/a@sha512:" + "0" * 128],
)  # fmt: skip
def test_what_is_no_reference_or_elsewhere_is_refused(tmp_path: Path, source: str) -> None:
    config = load_config({"adapters": {"roots": [str(tmp_path)], "urls": ["oci://host/ok/", "https://host/ok/"]}})
    sources = open_sources(config.adapters, {}, base_name="base")
    with pytest.raises(UnsafeSource):
        sources.locate(source)


def test_a_tag_or_digest_is_needed() -> None:
    with pytest.raises(InvalidRequest, match="oci://host/ok/a:latest"):
        check_source("oci://host/ok/a")
    with pytest.raises(InvalidRequest, match="a tag is missing"):
        check_source("oci://host:5000/a")
    with pytest.raises(ConfigError, match="has no tag"):
        TemplateResolver("oci://host:5000/{name}", [])
    assert TemplateResolver("oci://host:5000/{name}:v1", []).source("org/a", "default") == "oci://host:5000/org/a:v1"


def test_options_are_checked_before_anything_starts(tmp_path: Path) -> None:
    for options in ({"insecure": True}, {"plain_http": True}, {"token_hosts": "a"}, {"allow_private_addresses": 1}):
        settings = {"roots": [str(tmp_path)], "urls": ["oci://host/"], "url_options": {"oci": options}}
        with pytest.raises(ConfigError, match=r"plain_http and token_hosts"):
            open_sources(load_config({"adapters": settings}).adapters, {}, base_name="base")


def test_the_settings_and_the_environment_open_a_registry(
    tmp_path: Path, registry: ImitatedRegistry, files: dict[str, bytes]
) -> None:
    push_files(registry.host, "team/a", "v1", files)
    registry.auth = "bearer"
    docker_config(tmp_path, registry)
    settings = {
        "roots": [str(tmp_path)],
        "urls": [f"oci://{registry.host}/team/"],
        "url_options": {"oci": {"plain_http": [registry.host]}},
    }
    config = load_config({"adapters": settings}).adapters
    for environ, error in (({"DOCKER_CONFIG": str(tmp_path)}, None), ({"DOCKER_CONFIG": "/nowhere"}, NotFound)):
        folder = tmp_path / f"fetched {error}"
        folder.mkdir()
        found = open_sources(config, environ, base_name="base").locate(f"oci://{registry.host}/team/a:v1")
        assert isinstance(found, RemoteSource)
        if error is None:
            assert found.fetch(folder).startswith(f"oci://{registry.host}/team/a@sha256:")
            assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == files
        else:
            with pytest.raises(error):
                found.fetch(folder)


@pytest.mark.parametrize("auth", ["", "basic"])
def test_a_tag_becomes_the_digest_that_it_points_to(
    tmp_path: Path, open_library: OpenLibrary, open_registry: OpenRegistry, auth: str
) -> None:
    registry = open_registry(auth)
    library = open_library(fetcher(registry, docker_config=docker_config(tmp_path, registry)))
    first, first_card = new_adapter(tmp_path / "one")
    second, second_card = new_adapter(tmp_path / "two")
    digest = push_files(registry.host, "team/sql", "v1", first | {"README.md": b"x"})
    located = library.from_source(f"oci://{registry.host}/team/sql:v1")
    assert located.uri == f"oci://{registry.host}/team/sql@{digest}"
    assert located.packed.card == first_card
    assert library.from_disk(first_card.digest, located.uri) is not None
    push_files(registry.host, "team/sql", "v1", second)
    assert library.from_source(f"oci://{registry.host}/team/sql:v1").packed.card == second_card
    assert library.from_source(located.uri).packed.card == first_card, "a digest does not move"
    assert library.from_source(f"oci://{registry.host}/team/sql:v1@{digest}").packed.card == first_card
    for missing in ("team/sql:v2", "team/none:v1", "team/SQL:v1", f"team/sql@{digest_of(b'none')}"):
        with pytest.raises(NotFound, match="the registry has no"):
            library.from_source(f"oci://{registry.host}/{missing}")


def layouts(files: dict[str, bytes]) -> dict[str, list[tuple[str, dict[str, str], bytes]]]:
    inner = {f"out/adapter/{name}": data for name, data in files.items()}
    noise = {"out/README.md": b"x", "base/tokenizer_config.json": b"{of the base}", "out/optimizer.pt": b"x" * 100}
    packed = {"io.deis.oras.content.unpack": "true", TITLE: "adapter"}
    return {
        "oras": [(FILE, {TITLE: name}, data) for name, data in files.items()],
        "oras with paths": [(FILE, {TITLE: name}, data) for name, data in (inner | noise).items()],
        "oras folder": [(f"{FILE}+gzip", packed, tar(inner | noise, "gzip"))],
        "oras, any type": [("application/octet-stream", {TITLE: name}, data) for name, data in files.items()],
        "kitops": [
            (f"{KIT}model.v1.tar+gzip", {}, tar(inner, "gzip")),
            (f"{KIT}dataset.v1.tar", {}, b"is not read"),
            (f"{KIT}code.v1.tar+gzip", {}, b"is not read"),
        ],
        "kitops part": [(f"{KIT}modelpart.v1.tar", {TITLE: "adapter"}, tar(inner))],
        "model pack": [(f"{CNCF}weight.v1.tar", {"org.cncf.model.filepath": "adapter"}, tar(inner | noise))],
        "model pack, zstd": [(f"{CNCF}weight.v1.tar+zstd", {}, tar(inner, "zstd"))],
        "model pack, raw": [
            (f"{CNCF}weight{'.config' if name != WEIGHTS else ''}.v1.raw", {"org.cncf.model.filepath": name}, data)
            for name, data in inner.items()
        ],
        "model pack, two archives": [
            (f"{CNCF}weight.v1.tar", {}, tar({name: data})) for name, data in inner.items()
        ] + [(f"{CNCF}doc.v1.tar", {}, b"is not read")],
        "image": [("application/vnd.docker.image.rootfs.diff.tar.gzip", {}, tar(inner, "gzip"))],
        "image, later layers win": [
            (FILE, {}, tar(dict.fromkeys(inner, b"older"))), (f"{FILE}+gzip", {}, tar(inner, "gzip")),
        ],
    }  # fmt: skip


@pytest.mark.parametrize("layout", layouts({}))
def test_every_layout_gives_the_adapter(
    open_library: OpenLibrary, open_registry: OpenRegistry, files: dict[str, bytes], card: AdapterCard, layout: str
) -> None:
    registry = open_registry("")
    files = files | {"chat_template.jinja": b"{{ messages[0].content }}"}
    push(registry.host, "a", "v1", layouts(files)[layout])
    _, packed, _ = open_library(fetcher(registry)).from_source(f"oci://{registry.host}/a:v1")
    assert packed.card.digest == card.digest
    assert "{{ messages[0].content }}" in packed.card.text


def test_a_card(tmp_path: Path, open_library: OpenLibrary, registry: ImitatedRegistry, card: AdapterCard) -> None:
    path = tmp_path / f"x{CARD_SUFFIX}"
    write_card(path, ArrowCard("x", read_raw_peft(tmp_path / "original", SPEC), {}))
    push_files(registry.host, "a", "v1", {f"cards/{path.name}": path.read_bytes()})
    found = open_library(fetcher(registry)).from_source(f"oci://{registry.host}/a:v1")
    assert found.packed.card.digest == card.digest


def test_an_index_of_one_manifest(
    open_library: OpenLibrary, open_registry: OpenRegistry, files: dict[str, bytes], card: AdapterCard
) -> None:
    registry = open_registry("")
    library = open_library(fetcher(registry))
    digests = [push_files(registry.host, "a", f"m{number}", files | {"README.md": b"%d" % number}) for number in (0, 1)]
    entries = [
        {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": 1000}
        for digest in digests
    ]
    attestation = entries[1] | {"platform": {"os": "unknown", "architecture": "unknown"}}
    index = push_manifest(registry.host, "a", "one", {"manifests": [entries[0], attestation]})
    located = library.from_source(f"oci://{registry.host}/a:one")
    assert located.uri == f"oci://{registry.host}/a@{index}", "the version is what the tag names"
    assert located.packed.card == card
    push_manifest(registry.host, "a", "two", {"manifests": entries})
    with pytest.raises(AdapterFormatError, match=f"index of 2 manifests; name one of them: {digests[0]}"):
        library.from_source(f"oci://{registry.host}/a:two")
    nested = {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": index, "size": 1000}
    push_manifest(registry.host, "a", "nested", {"manifests": [nested]})
    with pytest.raises(AdapterFormatError, match="index of an index"):
        library.from_source(f"oci://{registry.host}/a:nested")


def test_artifacts_without_one_adapter_are_refused(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes]
) -> None:
    library = open_library(fetcher(registry))

    def refused(layers: list[tuple[str, dict[str, str], bytes]], match: str) -> None:
        push(registry.host, "a", "v1", layers)
        with pytest.raises(AdapterFormatError, match=match):
            library.from_source(f"oci://{registry.host}/a:v1")

    gguf = ("application/vnd.ollama.image.adapter", {}, b"GGUF")
    refused([gguf], "has none|ollama")
    refused([], "has none")
    two = {f"{folder}/{name}": data for folder in ("a", "b") for name, data in files.items()}
    refused([(FILE, {}, tar(two))], r"more than one: \['a/adapter_config.json', 'b/adapter_config.json'\]")
    refused([(FILE, {TITLE: CONFIG}, files[CONFIG])], f"no {WEIGHTS}")
    split = {f"a/{CONFIG}": files[CONFIG], f"b/{WEIGHTS}": files[WEIGHTS]}
    refused([(FILE, {}, tar(split))], f"no {WEIGHTS}")
    deleted = [(FILE, {}, tar(files)), (FILE, {}, tar({f".wh.{CONFIG}": b""}))]
    refused(deleted, r"\.wh\.adapter_config\.json' deletes a file")
    refused([(FILE, {TITLE: f"../{CONFIG}"}, files[CONFIG])], "leads out")
    refused([(FILE, {}, tar({f"../../{CONFIG}": files[CONFIG]}))], r"'\.\./\.\./adapter_config\.json' leads out")


@pytest.mark.parametrize(
    "document",
    [{"layers": [], "manifests": []}, {}, {"layers": {}}, {"layers": [1]}, {"schemaVersion": 1, "layers": []},
     {"layers": [{"digest": "sha256:0", "size": 1}]}, {"layers": [{"digest": f"sha512:{'0' * 128}", "size": 1}]},
     {"layers": [{"digest": digest_of(b""), "size": size} for size in (-1, True, "1", 1.0)]},
     {"layers": [{"digest": f"{digest_of(b'')}/../../x", "size": 0}]}, {"manifests": [{"digest": "../x", "size": 1}]}],
)  # fmt: skip
def test_malformed_manifests(open_library: OpenLibrary, registry: ImitatedRegistry, document: dict[str, Any]) -> None:
    for layer in document["layers"] if isinstance(document.get("layers"), list) else ():
        if isinstance(layer, dict):
            layer["mediaType"] = FILE
    push_manifest(registry.host, "a", "v1", document)
    with pytest.raises(AdapterFormatError):
        open_library(fetcher(registry)).from_source(f"oci://{registry.host}/a:v1")
    assert not [path for path in registry.paths() if "/blobs/sha" in path]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: bytes(len(data))])
def test_what_differs_from_its_digest_is_not_read(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes], change: Any, tmp_path: Path
) -> None:
    library = open_library(fetcher(registry))
    push_files(registry.host, "a", "v1", files)
    registry.blobs["a", digest_of(files[WEIGHTS])] = change(files[WEIGHTS])
    with pytest.raises(SourceError, match="has other contents"):
        library.from_source(f"oci://{registry.host}/a:v1")
    digest = push_files(registry.host, "b", "v1", files)
    kind, contents = registry.manifests["b", digest]
    registry.manifests["b", digest] = kind, contents + b" "
    with pytest.raises(SourceError, match="but should have"):
        library.from_source(f"oci://{registry.host}/b@{digest}")
    assert not list((tmp_path / "disk" / "staging").glob("*/*"))


def test_a_tags_manifest_has_the_digest_that_the_registry_states(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes]
) -> None:
    digest = push_files(registry.host, "a", "v1", files)
    contents = registry.manifests["a", digest][1] + b" "
    registry.answers["/v2/a/manifests/v1"] = lambda: (200, {"Docker-Content-Digest": digest}, contents)
    with pytest.raises(SourceError, match="but should have"):
        open_library(fetcher(registry)).from_source(f"oci://{registry.host}/a:v1")


def test_sizes_are_limited_before_anything_is_downloaded(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes], tmp_path: Path
) -> None:
    library = open_library(fetcher(registry))
    push_files(registry.host, "a", "v1", files | {WEIGHTS: bytes(LIMIT + 1)})
    with pytest.raises(AdapterTooLarge, match=f"{WEIGHTS} of .* has {LIMIT + 1} bytes"):
        library.from_source(f"oci://{registry.host}/a:v1")
    assert not [path for path in registry.paths() if path.startswith("/v2/a/blobs/sha")]
    push(registry.host, "a", "v2", [(f"{FILE}+gzip", {}, tar({WEIGHTS: bytes(LIMIT + 1)}, "gzip"))])
    with pytest.raises(AdapterTooLarge, match="unpacks to more"):
        library.from_source(f"oci://{registry.host}/a:v2")
    registry.answers["/v2/a/manifests/v3"] = lambda: (200, {}, bytes(5 << 20))
    with pytest.raises(SourceError, match="more than 4194304 bytes"):
        library.from_source(f"oci://{registry.host}/a:v3")
    reserved: list[int] = []
    folder = tmp_path / "fetched"
    folder.mkdir()
    push(registry.host, "a", "v4", [(FILE, {}, blob := tar(files))])
    counting = fetcher(registry, reserve=lambda _, num_bytes, __: reserved.append(num_bytes))
    counting.fetch(f"oci://{registry.host}/a:v4", folder, "default")
    assert sorted(reserved) == sorted([len(blob), *(len(data) for data in files.values())])


def test_a_silent_registry_ends_at_the_timeout(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes]
) -> None:
    import threading

    silence = threading.Event()
    push_files(registry.host, "a", "v1", files)
    registry.answers[f"/v2/a/blobs/{digest_of(files[WEIGHTS])}"] = lambda: (silence.wait(600), {}, b"")  # type: ignore[dict-item,return-value]
    with pytest.raises(SourceError, match=r"not fetched within adapters\.source_timeout_s 0\.5"):
        open_library(fetcher(registry, timeout_s=0.5)).from_source(f"oci://{registry.host}/a:v1")
    silence.set()


def test_a_registry_that_fails_or_is_not_there(
    open_library: OpenLibrary, registry: ImitatedRegistry, files: dict[str, bytes]
) -> None:
    library = open_library(fetcher(registry))
    push_files(registry.host, "a", "v1", files)
    registry.answers["/v2/a/manifests/v1"] = lambda: (
        429, {}, b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "slower"}]}',
    )  # fmt: skip
    with pytest.raises(SourceError, match=r"answered 429 .*TOOMANYREQUESTS.*slower"):
        library.from_source(f"oci://{registry.host}/a:v1")
    for body in (b"", b"[]", b'{"errors": []}', b'{"errors": 1}', b"\xff", b"[" * 100_000):
        registry.answers["/v2/a/manifests/v1"] = lambda body=body: (500, {}, body)  # type: ignore[misc]
        with pytest.raises(SourceError, match="answered 500"):
            library.from_source(f"oci://{registry.host}/a:v1")
    with pytest.raises(SourceError, match="cannot fetch oci"):  # TLS where there is none
        open_library(fetcher(registry, plain_http=[])).from_source(f"oci://{registry.host}/a:v1")


def test_projects_load_their_own_part(tmp_path: Path, registry: ImitatedRegistry, files: dict[str, bytes]) -> None:
    sources = Sources([tmp_path], [fetcher(registry, prefix="{tenant}/")])
    sources.locate(f"oci://{registry.host}/proj_a/x:v1")
    with pytest.raises(UnsafeSource):
        sources.locate(f"oci://{registry.host}/:v1")
    push_blob(registry.host, "proj_b", files[WEIGHTS])
    with pytest.raises(UnsafeSource):
        sources.locate(f"oci://{registry.host}/proj_a/../proj_b/x:v1")
