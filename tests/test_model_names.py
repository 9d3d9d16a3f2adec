"""What a name of a model is, and what a version of one is."""

from __future__ import annotations

import re

import pytest

from app.config import AppConfig
from app.deployments.ingress.http.request_parsing import NameConvertor
from app.engine.errors import InvalidRequest
from app.model_names import (
    MAX_NAME_CHARS,
    ROUTE_SUFFIXES,
    ModelVersion,
    base_warning,
    check_model_id,
    check_name,
    is_name,
    split_version,
)

DIGEST = "3f9c2a71" * 8


@pytest.mark.parametrize(
    "name",
    ["sql", "org/name", "Qwen/Qwen3-0.6B", "accounts/acme/models/legal-v2", "a.b/c..d", "load", "loads/x", "load/x",
     "proj_x", "x/proj_y", "a" * MAX_NAME_CHARS, f"a/{'b' * (MAX_NAME_CHARS - 2)}"],
)  # fmt: skip
def test_names(name: str) -> None:
    check_name(name)
    assert is_name(name)
    check_model_id(name)
    check_model_id(f"proj_1:{name}")


@pytest.mark.parametrize(
    "name",
    ["", "/", "/sql", "sql/", "org//name", "../x", "org/..", "org/../x", "./x", "org/.hidden", "-x", "org/-x", "a b",
     "a\n", "org/a\n", "a:b", "a@b", "a@2", f"a@{DIGEST}", "ä", "a%2Fb", "a\\b", "a" * (MAX_NAME_CHARS + 1),
     "proj_1/x", *(f"org/{suffix}" for suffix in ROUTE_SUFFIXES), "a/b/load"],
)  # fmt: skip
def test_what_is_no_name(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(InvalidRequest):
        check_name(name)
    with pytest.raises(InvalidRequest):
        check_model_id(f"proj_1:{name}")


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("org/name", "org/name", None),
        ("org/name@3", "org/name", ModelVersion(generation=3)),
        ("a@1234567", "a", ModelVersion(generation=1234567)),
        ("a@12345678", "a", ModelVersion(digest_prefix="12345678")),
        ("a@3F9C2A71", "a", ModelVersion(digest_prefix="3f9c2a71")),
        (f"a@sha256:{DIGEST}", "a", ModelVersion(digest_prefix=DIGEST)),
        ("a@0", "a@0", None),
        ("a@01", "a@01", None),
        ("a@3f9c2a7", "a@3f9c2a7", None),
        (f"a@{DIGEST}0", f"a@{DIGEST}0", None),
        ("a@main", "a@main", None),
        ("a@2@3", "a@2@3", None),
        ("a@", "a@", None),
    ],
)
def test_versions(text: str, name: str, version: ModelVersion | None) -> None:
    assert split_version(text) == (name, version)


def test_a_version_is_of_its_contents_only() -> None:
    assert ModelVersion(generation=3).is_of(DIGEST, 3)
    assert not ModelVersion(generation=3).is_of(DIGEST, 4)
    assert not ModelVersion(generation=3).is_of(DIGEST), "the base has no generation"
    assert ModelVersion(digest_prefix="3f9c2a71").is_of(DIGEST, 4)
    assert not ModelVersion(digest_prefix="9c2a713f").is_of(DIGEST, 4)


def test_the_error_says_what_a_name_may_be() -> None:
    for name, says in (("org/load", "route"), ("proj_1/x", "folders"), ("a@2", "version"), ("a b", "1 to 128")):
        with pytest.raises(InvalidRequest, match=says):
            check_name(name)


@pytest.mark.parametrize(
    ("trained_on", "base_name", "base_uri", "is_same"),
    [
        ("Qwen/Qwen3-0.6B", "qwen", "hf://Qwen/Qwen3-0.6B@main", True),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "/models/base", True),
        ("unsloth/qwen3-0.6b-unsloth-bnb-4bit", "base", "/models/Qwen3-0.6B/", True),
        ("/home/me/Qwen3-0.6B", "qwen3-0.6b", "/models/x", True),
        (r"C:\models\Qwen3-0.6B", "Qwen3_0.6B", "/models/x", True),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289", "qwen3-0.6b", "x", True),
        ("Qwen3-0.6B", "base", "pypi://pack==1.0/pack/Qwen3-0.6B-UD-Q4_K_XL.gguf#sha256=00", True),
        ("Qwen3-0.6B", "base", "/models/Qwen3-0.6B.BF16.gguf", True),
        ("", "base", "/models/x", True),
        (None, "base", "/models/x", True),
        ("Qwen/Qwen3-0.6B-Base", "Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B@main", False),
        ("Qwen/Qwen2.5-0.5B", "base", "hf://Qwen/Qwen2.5-1.5B@main", False),
        ("meta-llama/Llama-2-7b-hf", "base", "/models/Llama-3-7b-hf", False),
    ],
)
def test_an_adapter_of_another_base_model(trained_on: str | None, base_name: str, base_uri: str, is_same: bool) -> None:
    warning = base_warning(trained_on, base_name, base_uri)
    assert (warning is None) == is_same
    if warning is not None:
        assert repr(trained_on) in warning
        assert repr(base_name) in warning


def test_a_warning_is_one_line() -> None:
    warning = base_warning("a\nb" * 1000, "base", "/models/x")
    assert warning is not None
    assert "\n" not in warning
    assert len(warning) < 500


@pytest.mark.parametrize("path", ["sql", "org/name", "a/b/c", "load", "load/x"])
def test_each_path_has_one_route(path: str) -> None:
    whole = re.compile(f"^/v1/loras/(?P<name>{NameConvertor.regex})$")
    found = whole.match(f"/v1/loras/{path}")
    assert found is not None
    assert found["name"] == path
    for suffix in ROUTE_SUFFIXES:
        below = re.compile(f"^/v1/loras/(?P<name>{NameConvertor.regex})/{suffix}$")
        assert whole.match(f"/v1/loras/{path}/{suffix}") is None
        found = below.match(f"/v1/loras/{path}/{suffix}")
        assert found is not None
        assert found["name"] == path


@pytest.mark.parametrize(
    ("content", "is_right"),
    [
        ({"model": {"name": "Qwen/Qwen3-0.6B"}}, True),
        ({"model": {"name": "Qwen/../x"}}, False),
        ({"adapters": {"preload": [{"name": "org/sql", "path": "sql"}]}}, True),
        ({"adapters": {"preload": [{"name": "org/sql@2", "path": "sql"}]}}, False),
        ({"adapters": {"preload": [{"name": "org/load", "path": "sql"}]}}, False),
        ({"tenants": {"prices": {"org/sql": {"input": 1}, "proj_1:org/sql": {"input": 1}}}}, True),
        ({"tenants": {"prices": {"org/sql@2": {"input": 1}}}}, False),
        ({"tenants": {"prices": {"x:sql": {"input": 1}}}}, False),
    ],
)
def test_names_in_settings(content: dict[str, object], is_right: bool) -> None:
    if is_right:
        AppConfig.model_validate(content)
    else:
        with pytest.raises(ValueError, match=r"name|version|project"):
            AppConfig.model_validate(content)
