"""Nothing outside the roots can be named, by any spelling."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.adapters.paths import resolve_adapter_path
from app.engine.errors import NotFound, UnsafeSource
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


def test_a_link_may_point_inside_a_root(tmp_path: Path, roots: list[Path]) -> None:
    (tmp_path / "one" / "alias").symlink_to(tmp_path / "real_two" / "persona")
    assert resolve_adapter_path("alias", roots) == tmp_path / "real_two" / "persona"


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


@pytest.mark.parametrize("linked", ["folder", "file", "chain"])
def test_a_link_out_of_the_roots_is_refused(tmp_path: Path, roots: list[Path], linked: str) -> None:
    secret = tmp_path / "outside" / "secret"
    evil = tmp_path / "one" / "evil"
    if linked == "file":
        evil.mkdir()
        (evil / "adapter_config.json").write_text("{}")
        (evil / "adapter_model.safetensors").symlink_to(secret / "adapter_config.json")
    elif linked == "folder":
        evil.symlink_to(secret)
    else:
        (tmp_path / "one" / "step").symlink_to(Path("..") / "outside")
        evil.symlink_to(Path("step") / "secret")
    with pytest.raises(UnsafeSource):
        resolve_adapter_path("evil", roots)


def test_what_does_not_exist_under_a_root_is_not_found(tmp_path: Path, roots: list[Path]) -> None:
    (tmp_path / "one" / "loop").symlink_to("loop")
    (tmp_path / "one" / "dangling").symlink_to("nowhere")
    absent = ["absent", "loop", "dangling", "sql/absent", "file:///etc/passwd", "~", "\ud800", "x" * 300]
    for asked in [*absent, str(tmp_path / "one" / "absent")]:
        with pytest.raises(NotFound):
            resolve_adapter_path(asked, roots)


def test_what_may_be_a_hubs_is_told_how_that_is_written(tmp_path: Path, roots: list[Path]) -> None:
    with pytest.raises(NotFound, match=r"under the server's adapter roots; .* 'hf://acme/sql-lora@main'$"):
        resolve_adapter_path("acme/sql-lora", roots)
    (tmp_path / "one" / "run").symlink_to(tmp_path / "nowhere")
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
