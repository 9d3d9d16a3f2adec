"""Every kind of source gives the adapter it holds, nothing it does not, and one kind of error."""

from __future__ import annotations

import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.config import AdaptersConfig, load_config
from app.deployments.store.adapter_reader import open_sources
from app.deployments.store.sources.addresses import is_private_name, public_socket
from app.deployments.store.sources.fetch_timeout import FetchTimeout
from app.deployments.store.sources.hub import HubFetcher
from app.deployments.store.sources.plugin import PluginFetcher
from app.deployments.store.sources.source_resolution import RemoteSource, Sources
from app.deployments.store.sources.urls import UrlFetcher
from app.engine.adapters.adapter_tokenizer import TEXT_FILES
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.formats.arrow import CARD_SUFFIX, ArrowCard, write_card
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.errors import (
    AdapterError,
    AdapterFormatError,
    AdapterReadFailed,
    AdapterTooLarge,
    ConfigError,
    NotFound,
    SourceError,
    UnsafeSource,
)
from tests.deployments.store.sources.conftest import SPEC, OpenLibrary, new_adapter
from tests.deployments.store.sources.servers import FileServer, HubServer

LIMIT = 1 << 20


def urls(*prefixes: str, timeout_s: float = 120.0, **options: dict[str, object]) -> UrlFetcher:
    return UrlFetcher(prefixes, options=options, max_bytes=LIMIT, timeout_s=timeout_s)


def serve(server: FileServer, folder: str, files: dict[str, bytes]) -> str:
    server.files |= {f"{folder}/{name}": contents for name, contents in files.items()}
    return server.url + folder


@pytest.mark.parametrize(
    "source",
    [
        "ftp://host/a", "file:///etc/passwd", "s3://other/a", "http://127.0.0.1/a", "https://host.example/", "zip://a",
        "simplecache::https://host/ok/a", "https://host/ok/../x", "https://host/ok/./x", "https://user@host/ok/a",
        "https://host/ok/a?b=c", "https://host/ok/a#b", "https://host/ok/%2e%2e/x", "https://host/ok/a\n", "://", "hf://",
        "https://host:80@evil/ok/a", "https://host/okay/a", "HTTPS://host/ok/a", "https://hоst/ok/a", "a\0://b",
        "https://host/ok/" + "a" * 5000, "https://host\\@evil/ok/", "hf://org/name@main",
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_refused_by_its_text(tmp_path: Path, source: str) -> None:
    sources = Sources([tmp_path], [urls("s3://bucket/a/", "https://host/ok/")])
    with pytest.raises(UnsafeSource):
        sources.locate(source)
    assert isinstance(sources.locate("https://host/ok/a"), RemoteSource)


def test_a_configuration_opens_only_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"adapters": {"roots": [str(tmp_path)]}}).adapters
    assert isinstance(open_sources(config, {}, base_name="base").locate("hf://o/n@main"), RemoteSource)
    with pytest.raises(UnsafeSource):
        open_sources(config, {}, base_name="base").locate("https://host/a")
    with pytest.raises(UnsafeSource):
        open_sources(config.model_copy(update={"hub": ()}), {}, base_name="base").locate("hf://o/n@main")
    for bad in ("https://host", "file:///", "s3://bucket/../", "https://host/a?", "https://u@h/"):
        with pytest.raises(ConfigError, match="urls"):
            load_config({"adapters": {"urls": [bad]}})
    module = types.ModuleType("a_plugin")
    asked: list[str] = []
    module.get = lambda uri, _: asked.append(uri)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_plugin", module)
    sources = open_sources(config, {"LORA_DOWNLOADER_PLUGIN": "a_plugin:get"}, base_name="base")
    for uri in ("hf://o/n@main", "models://anything/else"):
        place = sources.locate(uri)
        assert isinstance(place, RemoteSource)
        assert place.fetch(tmp_path) == uri
    assert asked == ["hf://o/n@main", "models://anything/else"]
    for bad in ("a_plugin:put", "no_such_module:get", "get", ""):
        with pytest.raises(ConfigError, match="custom_fetcher"):
            PluginFetcher(bad, "base")
    assert AdaptersConfig().custom_fetcher is None


def test_a_downloader_may_be_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str]] = []

    class Downloader:
        def download_lora_to_disk(self, name: str, base_model: str, path: str) -> str:
            asked.append((name, base_model, path))
            return path

    class Nothing:
        pass

    class Broken:
        def __init__(self, host: str) -> None: ...

        def download_lora_to_disk(self, name: str, base_model: str, path: str) -> None: ...

    module = types.ModuleType("a_plugin")
    for one in (Downloader, Nothing, Broken):
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, "a_plugin", module)
    config = load_config({"adapters": {"roots": [str(tmp_path)]}}).adapters
    place = open_sources(config, {"LORA_DOWNLOADER_PLUGIN": "a_plugin.Downloader"}, base_name="base").locate("any://a")
    assert isinstance(place, RemoteSource)
    assert place.fetch(tmp_path) == "any://a", "what the method returns is not where the adapter came from"
    assert asked == [("any://a", "base", str(tmp_path))]
    with pytest.raises(ConfigError, match="without download_lora_to_disk"):
        PluginFetcher("a_plugin.Nothing", "base")
    with pytest.raises(ConfigError, match="cannot be constructed: TypeError"):
        PluginFetcher("a_plugin.Broken", "base")


@pytest.mark.parametrize("place", ["folder", "elsewhere", "model"])
def test_plugins_of_dynamo_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A `LoRASourceProtocol` is asynchronous; a `LoraDownloaderBase` returns a model with its path."""
    elsewhere, folder = tmp_path / "cache", tmp_path / "folder"
    elsewhere.mkdir()
    folder.mkdir()
    (tmp_path / "blob").write_text("weights")
    (elsewhere / "adapter_model.safetensors").symlink_to(tmp_path / "blob")  # as in the hub's cache

    class Source:
        async def exists(self, lora_uri: str) -> bool:
            return lora_uri.endswith("/mine")

        async def download(self, lora_uri: str, dest_path: Path) -> Path:  # noqa: ARG002
            if place == "folder":
                (dest_path / "adapter_model.safetensors").write_text("weights")
                return dest_path
            return elsewhere

    class Downloader:
        def download_lora_to_disk(self, lora_name: str, base_model: str, lora_path: str | None = None) -> object:
            assert (lora_name, base_model, lora_path) == ("ours://a/mine", "base", str(folder))
            return types.SimpleNamespace(name=lora_name, status=1, local_path=str(elsewhere))

    module = types.ModuleType("a_plugin")
    module.Plugin = Downloader if place == "model" else Source  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_plugin", module)
    fetcher = PluginFetcher("a_plugin.Plugin", "base")
    assert fetcher.fetch("ours://a/mine", folder, "default") == "ours://a/mine"
    copied = folder / "adapter_model.safetensors"
    assert copied.read_text() == "weights"
    assert not copied.is_symlink()
    if place != "model":
        with pytest.raises(NotFound, match="ours://a/theirs"):
            fetcher.fetch("ours://a/theirs", folder, "default")


def test_lanes_separate_hosts_and_buckets(tmp_path: Path) -> None:
    sources = Sources([tmp_path])
    lanes = [sources.lane(text) for text in ("a/b", "s3://one/x", "s3://one/y/z", "s3://two/x", "https://one/x")]
    assert len(set(lanes)) == 4
    assert lanes[1] == lanes[2]


def test_a_web_server(
    open_library: OpenLibrary, server: FileServer, files: dict[str, bytes], card: AdapterCard
) -> None:
    url = serve(server, "/adapters/a", files)
    library = open_library(urls(f"{server.url}/adapters/"))
    uri, packed, _ = library.from_source(url)
    assert (uri, packed.card) == (url, card)
    assert set(server.gets) == {f"/adapters/a/{name}" for name in {*files, *TEXT_FILES}}, "nothing else was asked for"
    storage = library.from_disk(card.digest, url)
    assert storage is not None
    assert storage.card == card
    again = open_library(urls(f"{server.url}/adapters/")).from_disk(card.digest, url)
    assert again is not None, "the disk tier outlives the process"
    assert sum(server.gets.values()) == len({*files, *TEXT_FILES})
    with pytest.raises(NotFound):
        library.from_source(f"{server.url}/adapters/none")


@pytest.mark.parametrize("header", ["Location", "URI"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 300, 304])
def test_a_redirect_leads_to_allowed_places_only(
    open_library: OpenLibrary, server: FileServer, files: dict[str, bytes], status: int, header: str
) -> None:
    """aiohttp would follow `URI`, too. /secret is below no prefix."""
    serve(server, "/secret", files)
    serve(server, "/ok/real", files)
    targets = {"/ok/out": "/secret/", "/ok/dots": "/ok/%2e%2e/secret/", "/ok/in": "/ok/real/", "/ok/loop": "/ok/loop/"}
    targets |= {"/ok/elsewhere": "http://169.254.169.254/ok/", "/ok/empty": ""}

    def answer(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        folder, _, name = path.rpartition("/")
        if folder not in targets:
            return server._file(method, path)
        target = targets[folder]
        return status, {header: target + name if target else ""}, b"{}" if status != 304 else b""

    server.answer = answer
    library = open_library(urls(f"{server.url}/ok/"))
    for folder in ("out", "dots", "elsewhere", "loop", "empty"):
        with pytest.raises((UnsafeSource, SourceError), match=r"redirects|without a Location"):
            library.from_source(f"{server.url}/ok/{folder}")
    if header == "Location":
        assert library.from_source(f"{server.url}/ok/in").uri == f"{server.url}/ok/in"
    assert not [path for path in server.gets if path.startswith("/secret")]


def test_a_public_name_with_a_private_address_is_refused(
    open_library: OpenLibrary, server: FileServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may point it at whatever this machine reaches, at any time."""
    serve(server, "/a", files)
    host, port = "adapters.example", server.url.rpartition(":")[2]
    real = socket.getaddrinfo

    def resolve(name: str, *more: Any, **named: Any) -> Any:
        return real("127.0.0.1" if name.endswith(host) else name, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(SourceError, match=r"127\.0\.0\.1 is not public"):
        open_library(urls(f"http://{host}:{port}/")).from_source(f"http://{host}:{port}/a")
    assert not server.gets
    allowed = urls(f"http://{host}:{port}/", http={"allow_private_addresses": True})
    assert open_library(allowed).from_source(f"http://{host}:{port}/a").uri == f"http://{host}:{port}/a"


def test_addresses_and_names_that_are_private() -> None:
    for host in ("127.0.0.1", "10.0.0.1", "::1", "169.254.169.254", "minio", "localhost", "minio.models.svc", "a.lan"):
        assert is_private_name(host), host
    for host in ("example.com", "local.example.com", "localhost.example", "10.0.0.1.example"):
        assert not is_private_name(host), host
    for address in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "0.0.0.0", "::1", "fe80::1%eth0",
                    "fd00::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1"):  # fmt: skip
        with pytest.raises(SourceError, match="not public"):
            public_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)))
    for address in ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:93.184.215.14"):
        public_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))).close()


def test_a_card_by_url(tmp_path: Path, open_library: OpenLibrary, server: FileServer, card: AdapterCard) -> None:
    path = tmp_path / f"x{CARD_SUFFIX}"
    write_card(path, ArrowCard("x", read_raw_peft(tmp_path / "original", SPEC), {}))
    url = serve(server, "/a", {path.name: path.read_bytes()}) + f"/{path.name}"
    library = open_library(urls(f"{server.url}/"))
    assert library.from_source(url).packed.card.digest == card.digest
    storage = library.from_disk(card.digest, url)
    assert storage is not None


def test_what_is_damaged_on_disk_is_fetched_again(
    tmp_path: Path, open_library: OpenLibrary, server: FileServer, files: dict[str, bytes], card: AdapterCard
) -> None:
    url = serve(server, "/a", files)
    library = open_library(urls(f"{server.url}/"))
    library.from_source(url)
    (stored,) = (tmp_path / "disk" / "objects").glob("*/adapter_model.safetensors")
    contents = bytearray(stored.read_bytes())
    contents[-1] ^= 1
    stored.write_bytes(contents)
    assert library.from_disk(card.digest, url) is None
    assert not stored.exists()
    assert library.from_source(url).packed.card == card


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket "adapters" in moto's server; its endpoint."""
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def test_an_object_store(open_library: OpenLibrary, s3: str, files: dict[str, bytes], card: AdapterCard) -> None:
    import s3fs

    options = {"endpoint_url": s3}
    store = s3fs.S3FileSystem(**options)
    store.mkdir("adapters")
    store.mkdir("private")
    for name, contents in files.items():
        store.pipe_file(f"adapters/team/a/{name}", contents)
        store.pipe_file(f"private/team/a/{name}", contents)
    library = open_library(urls("s3://adapters/team/", s3=dict(options)))
    assert library.from_source("s3://adapters/team/a").packed.card == card
    assert library.from_disk(card.digest, "s3://adapters/team/a") is not None
    with pytest.raises(NotFound):
        library.from_source("s3://adapters/team/none")
    with pytest.raises(UnsafeSource):
        library.from_source("s3://private/team/a")
    store.pipe_file("adapters/team/a/adapter_model.safetensors", bytes(LIMIT + 1))
    with pytest.raises(AdapterTooLarge, match=str(LIMIT)):
        library.from_source("s3://adapters/team/a")


def test_a_hub(tmp_path: Path, open_library: OpenLibrary, hub: HubServer) -> None:
    fetcher = HubFetcher(hub.url, None, max_bytes=LIMIT, timeout_s=120)
    library = open_library(fetcher)
    extra = {"README.md": b"x", "pytorch_model.bin": b"x" * 100, "checkpoint-5/adapter_config.json": b"{}"}
    first, first_card = new_adapter(tmp_path / "one")
    sha = hub.commit("org/name", "main", first | extra)
    located = library.from_source("hf://org/name@main")
    assert located.uri == f"hf://org/name@{sha}"
    assert located.packed.card == first_card
    assert {path.rsplit("/", 1)[1] for path in hub.gets if "/resolve/" in path} == set(first)
    second, second_card = new_adapter(tmp_path / "two")
    hub.commit("org/name", "main", second)
    assert library.from_source("hf://org/name@main").packed.card == second_card
    assert library.from_source(located.uri).packed.card == first_card, "a commit does not move"
    for uri in ("hf://org/none@main", "hf://org/name@none"):
        with pytest.raises(NotFound):
            library.from_source(uri)
    hub.commit("org/empty", "main", {"README.md": b""})
    with pytest.raises(NotFound, match="adapter_config"):
        library.from_source("hf://org/empty@main")
    hub.extra_sizes["adapter_model.safetensors"] = LIMIT + 1
    with pytest.raises(AdapterTooLarge):
        library.from_source("hf://org/name@main")
    hub.answer = lambda *_: (500, {}, b"")
    with pytest.raises(SourceError):
        library.from_source(located.uri)
    closed = HubFetcher("http://127.0.0.1:9", None, max_bytes=LIMIT, timeout_s=5)
    with pytest.raises(SourceError):
        open_library(closed).from_source("hf://org/name@main")


class Plugin:
    """A downloader that does whatever a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deed: object) -> None:
        module = types.ModuleType("test_plugin")
        module.download = deed  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "test_plugin", module)
        self.fetcher = PluginFetcher("test_plugin:download", "base")


def test_a_plugin(
    open_library: OpenLibrary, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], card: AdapterCard
) -> None:
    def download(_uri: str, folder: Path) -> str:
        for name, contents in files.items():
            (folder / name).write_bytes(contents)
        (folder / "notes").mkdir()
        (folder / "notes" / "x").write_text("left behind")
        (folder / "entry.json").symlink_to("/etc/passwd")
        return "models://exact"

    library = open_library(Plugin(monkeypatch, download).fetcher)
    uri, packed, _ = library.from_source("models://a/b")
    assert (uri, packed.card) == ("models://exact", card)
    storage = library.from_disk(card.digest, "models://exact")
    assert storage is not None
    assert storage.card == card


@pytest.mark.parametrize("attack", ["symlink", "hard link", "folder", "pipe", "missing", "raises", "exits", "pickle"])
def test_a_plugin_that_delivers_something_else(
    tmp_path: Path,
    open_library: OpenLibrary,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, bytes],
    attack: str,
) -> None:
    import os

    def download(_uri: str, folder: Path) -> None:
        (folder / "adapter_config.json").write_bytes(files["adapter_config.json"])
        weights = folder / "adapter_model.safetensors"
        original = tmp_path / "original" / weights.name
        deeds = {
            "symlink": lambda: weights.symlink_to(original),
            "hard link": lambda: weights.hardlink_to(original),
            "folder": weights.mkdir,
            "pipe": lambda: os.mkfifo(weights),
            "missing": lambda: None,
            "raises": lambda: 1 / 0,
            "exits": lambda: sys.exit(2),  # as command lines do
            "pickle": lambda: (folder / "adapter_model.bin").write_bytes(b"x"),
        }
        deeds[attack]()

    library = open_library(Plugin(monkeypatch, download).fetcher)
    with pytest.raises(SourceError if attack in {"raises", "exits"} else AdapterFormatError):
        library.from_source("models://a")
    assert not list((tmp_path / "disk" / "objects").iterdir())
    assert not list((tmp_path / "disk" / "staging").glob("*/*")), "nothing is left in staging"


def test_endless_and_silent_servers(open_library: OpenLibrary, server: FileServer, files: dict[str, bytes]) -> None:
    serve(server, "/long", files | {"adapter_model.safetensors": bytes(LIMIT + 1)})
    with pytest.raises(AdapterTooLarge):
        open_library(urls(f"{server.url}/")).from_source(f"{server.url}/long")
    serve(server, "/silent", files)
    server.gates["/silent/adapter_config.json"] = threading.Event()
    with pytest.raises(SourceError):
        open_library(urls(f"{server.url}/", timeout_s=0.3)).from_source(f"{server.url}/silent")
    server.answer = lambda *_: (500, {}, b"")
    with pytest.raises(SourceError):
        open_library(urls(f"{server.url}/")).from_source(f"{server.url}/a")


@pytest.fixture
def hanging_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names that were looked up and hang: those that end with `.hang.internal`. `.internal` is this machine."""
    gate, hanging, getaddrinfo = threading.Event(), list[str](), socket.getaddrinfo

    def look_up(host: str, *args: Any, **options: Any) -> Any:
        if host.endswith(".hang.internal"):
            hanging.append(host)
            gate.wait(600)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return getaddrinfo("127.0.0.1" if host.endswith(".internal") else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield hanging
    gate.set()


def test_a_load_whose_name_is_not_answered_ends_after_its_time(
    open_library: OpenLibrary, hanging_names: list[str]
) -> None:
    hub = HubFetcher("http://hub.hang.internal", None, max_bytes=LIMIT, timeout_s=600.0)
    for fetcher, source in ((urls("http://a.hang.internal/"), "http://a.hang.internal/a"), (hub, "hf://org/name@main")):
        with pytest.raises(SourceError, match=r"was not fetched within adapters.source_timeout_s 0.5"):
            open_library(FetchTimeout(fetcher, 0.5)).from_source(source)
    assert set(hanging_names) <= {"a.hang.internal", "hub.hang.internal"}


def test_names_that_are_not_answered_hold_up_no_others(
    open_library: OpenLibrary, server: FileServer, files: dict[str, bytes], hanging_names: list[str]
) -> None:
    serve(server, "/a", files)
    place = server.url.replace("127.0.0.1", "files.internal")
    prefixes = [f"http://h{number}.hang.internal/" for number in range(40)]
    patient = FetchTimeout(urls(*prefixes), 600.0)
    library = open_library(patient, urls(f"{place}/"))
    with ThreadPoolExecutor(len(prefixes)) as threads:
        waiting = [threads.submit(library.from_source, f"{prefix}a") for prefix in prefixes]
        try:
            deadline_s = time.monotonic() + 60
            while len(set(hanging_names)) < len(prefixes):
                assert time.monotonic() < deadline_s, f"only {len(set(hanging_names))} names are looked up"
                time.sleep(0.01)
            assert library.from_source(f"{place}/a").uri == f"{place}/a"
        finally:
            for prefix in prefixes:
                patient.abandon(f"{prefix}a")
        for load in waiting:
            with pytest.raises(SourceError, match="abandoned"):
                load.result()


def test_a_folder_that_changes_while_it_is_read(
    open_library: OpenLibrary, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> None:
    library = open_library()
    read = library._read

    def read_and_change(path: Path) -> object:
        packed = read(path)
        (path / "adapter_config.json").write_bytes(files["adapter_config.json"] + b" ")
        return packed

    monkeypatch.setattr(library, "_read", read_and_change)
    with pytest.raises(AdapterReadFailed, match="changed while"):
        library.from_source("original")


def test_local_adapters_are_not_copied(tmp_path: Path, open_library: OpenLibrary, card: AdapterCard) -> None:
    library = open_library()
    located = library.from_source("original")
    assert (located.uri, located.packed.card) == (str(tmp_path / "original"), card)
    assert library.from_disk(card.digest, located.uri) is None
    before = library.version("original")
    (tmp_path / "original" / "adapter_config.json").touch()
    assert library.version("original") != before
    (tmp_path / "original" / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError):
        library.from_source("original")
