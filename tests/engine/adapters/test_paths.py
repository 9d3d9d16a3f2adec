"""Nothing outside the roots can be named, by any spelling, and no link under them is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.adapters.bounded_files import open_plain_file, read_bounded
from app.engine.adapters.paths import named_path, resolve_adapter_path
from app.engine.errors import AdapterFormatError, NotFound, UnsafeSource
from tests.budgets import examples


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Two roots, one of them a link, and an adapter outside both."""
    for folder in ("one/sql", "one/team/json", "real_two/persona", "outside/secret"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "adapter_config.json").write_text("{}")
    (tmp_path / "one" / "card.lora.arrow").write_bytes(b"card")
    (tmp_path / "two").symlink_to(tmp_path / "real_two")
    return [tmp_path / "one", tmp_path / "two"]


def test_names_and_absolute_paths_under_a_root_are_found(tmp_path: Path, roots: list[Path]) -> None:
    one, two = tmp_path / "one", tmp_path / "real_two"
    for asked, found in {
        "sql": one / "sql",
        "./sql/": one / "sql",
        "team/json": one / "team/json",
        "persona": two / "persona",
        "card.lora.arrow": one / "card.lora.arrow",
        str(one / "sql"): one / "sql",
        str(tmp_path / "two" / "persona"): two / "persona",
        str(two / "persona"): two / "persona",
    }.items():
        assert resolve_adapter_path(asked, roots) == found


def test_a_root_that_hangs_leaves_the_paths_of_others(
    tmp_path: Path, roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, lstat = tmp_path / "hanging", os.lstat

    def hang(path: str | Path) -> os.stat_result:
        assert not str(path).startswith(str(hanging)), "it hangs"
        return lstat(path)

    monkeypatch.setattr(os, "lstat", hang)
    assert resolve_adapter_path(str(tmp_path / "one" / "sql"), [hanging, *roots]) == tmp_path / "one" / "sql"
    assert resolve_adapter_path("sql", [*roots, hanging]) == tmp_path / "one" / "sql"


@pytest.mark.parametrize("target", ["../sql", "../two_projects/b/secret", "nowhere", "stolen"])
def test_a_link_below_a_root_is_refused_wherever_it_points(tmp_path: Path, roots: list[Path], target: str) -> None:
    """A folder of a project is a boundary: a link from it into another project's folder is not followed."""
    (tmp_path / "one" / "a").mkdir()
    (tmp_path / "one" / "a" / "stolen").symlink_to(target)
    (tmp_path / "one" / "c").symlink_to("team")
    for asked in ("a/stolen", "a/stolen/inner", "c/json", str(tmp_path / "one" / "a" / "stolen")):
        with pytest.raises(UnsafeSource, match=r"leads through '(stolen|c)', a symbolic link"):
            resolve_adapter_path(asked, roots)


@pytest.mark.parametrize(
    "asked",
    [
        "../outside/secret",
        "sql/../../outside/secret",
        "sql/..",
        "..",
        ".",
        "/",
        "/etc/passwd",
        "/etc/does-not-exist",
        "//etc/passwd",
        "",
        "sql\0",
        "x" * 5000,
    ],
)
def test_what_leaves_the_roots_is_refused(roots: list[Path], asked: str) -> None:
    with pytest.raises(UnsafeSource):
        resolve_adapter_path(asked, roots)


def test_an_outside_path_tells_nothing_about_what_exists(tmp_path: Path, roots: list[Path]) -> None:
    messages = set()
    for name in ("secret", "absent"):
        with pytest.raises(UnsafeSource) as caught:
            resolve_adapter_path(str(tmp_path / "outside" / name), roots)
        messages.add(str(caught.value).replace(name, "*"))
    assert len(messages) == 1


def test_the_roots_themselves_are_not_adapters(roots: list[Path]) -> None:
    for root in roots:
        for spelling in (root, root.resolve()):
            with pytest.raises(UnsafeSource):
                resolve_adapter_path(str(spelling), roots)


@pytest.mark.parametrize("linked", ["folder", "chain"])
def test_a_link_out_of_the_roots_is_refused(tmp_path: Path, roots: list[Path], linked: str) -> None:
    secret = tmp_path / "outside" / "secret"
    evil = tmp_path / "one" / "evil"
    if linked == "folder":
        evil.symlink_to(secret)
    else:
        (tmp_path / "one" / "step").symlink_to(Path("..") / "outside")
        evil.symlink_to(Path("step") / "secret")
    with pytest.raises(UnsafeSource):
        resolve_adapter_path("evil", roots)


def test_what_does_not_exist_under_a_root_is_not_found(tmp_path: Path, roots: list[Path]) -> None:
    absent = ["absent", "sql/absent", "file:///etc/passwd", "~", "\ud800", "x" * 300]
    for asked in [*absent, str(tmp_path / "one" / "absent")]:
        with pytest.raises(NotFound):
            resolve_adapter_path(asked, roots)


def test_what_may_be_a_hubs_is_told_how_that_is_written(tmp_path: Path, roots: list[Path]) -> None:
    with pytest.raises(NotFound, match=r"under the server's adapter roots; .* 'hf://acme/sql-lora@main'$"):
        resolve_adapter_path("acme/sql-lora", roots)
    (tmp_path / "one" / "run").mkdir()
    for asked in ("sqll", "team/jsonn", "run/x", "a/b/c", "a b/c"):
        with pytest.raises(NotFound, match=r"under the server's adapter roots$"):
            resolve_adapter_path(asked, roots)


def test_what_is_outside_is_told_where_it_could_be(tmp_path: Path, roots: list[Path]) -> None:
    for asked in (str(tmp_path / "elsewhere"), str(tmp_path / "outside" / "secret")):
        with pytest.raises(UnsafeSource, match=r"adapters\.roots, or LORA_PATH when the service is started"):
            resolve_adapter_path(asked, roots)


def test_without_roots_nothing_is_read() -> None:
    with pytest.raises(UnsafeSource, match="LORA_PATH"):
        resolve_adapter_path("sql", [])


_PART = st.sampled_from(
    ["..", ".", "", "sql", "one", "outside", "secret", "evil", "/", "~", "%2e%2e", "..%2f", "\\", "etc"]
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(_PART, max_size=8), st.booleans())
def test_any_spelling_stays_inside(tmp_path_factory: pytest.TempPathFactory, parts: list[str], absolute: bool) -> None:
    base = tmp_path_factory.getbasetemp() / "spelling"
    root = base / "one"
    if not base.exists():
        (root / "sql").mkdir(parents=True)
        (base / "outside" / "secret").mkdir(parents=True)
        (root / "evil").symlink_to(base / "outside")
    asked = (str(root) + "/" if absolute else "") + "/".join(parts)
    try:
        found = resolve_adapter_path(asked, [root])
    except (UnsafeSource, NotFound):
        return
    assert os.path.realpath(found).startswith(os.path.realpath(root) + "/")


def test_a_link_that_is_swapped_in_after_the_check_is_refused(tmp_path: Path, roots: list[Path]) -> None:
    """Between the check of a path and the opening of its files, a folder on the way becomes a link."""
    found = resolve_adapter_path("team/json", roots)
    assert read_bounded(found / "adapter_config.json", 10) == b"{}"
    (tmp_path / "one" / "team").rename(tmp_path / "one" / "elsewhere")
    (tmp_path / "one" / "team").symlink_to(tmp_path / "one" / "elsewhere")
    with pytest.raises(AdapterFormatError, match="'team' is a symbolic link"):
        read_bounded(found / "adapter_config.json", 10)


@pytest.mark.parametrize("target", ["plain", "/etc/hostname", "/proc/self/fd/0", "nowhere", "link"])
def test_a_linked_file_is_refused_by_name(tmp_path: Path, target: str) -> None:
    (tmp_path / "plain").write_text("plain")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(AdapterFormatError, match="'link' is a symbolic link"):
        open_plain_file(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for strange in ("pipe", ".", "..", "plain/x", "a\0", "\ud800"):
        with pytest.raises(AdapterFormatError):
            open_plain_file(tmp_path / strange)


def test_opening_a_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("plain")
    (tmp_path / "link").symlink_to("plain")
    before = len(os.listdir("/proc/self/fd"))
    with open_plain_file(tmp_path / "plain") as file:
        assert file.read() == b"plain"
    for refused in ("link", "link/x", "absent/x", "."):
        with pytest.raises(AdapterFormatError):
            open_plain_file(tmp_path / refused)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_path_that_a_user_names_may_lie_behind_a_link(
    tmp_path: Path, roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert roots
    assert named_path(str(tmp_path / "two" / "persona")) == tmp_path / "real_two" / "persona"
    monkeypatch.chdir(tmp_path / "one" / "sql")
    assert named_path("../team/json") == tmp_path / "one" / "team" / "json"
    assert named_path(str(tmp_path / "two")) == tmp_path / "two"
