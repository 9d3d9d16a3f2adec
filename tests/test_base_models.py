"""`bases`: several base models in one file of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.base_models import load_bases
from app.cli.config_file import read_document
from app.config import AppConfig, load_config, usage_folder
from app.engine.errors import ConfigError

ROOT = Path(__file__).parents[1]
A, B = {"uri": "/models/a", "name": "a"}, {"uri": "/models/b", "name": "b"}


def test_without_bases_there_is_one() -> None:
    values = {"model": A, "limits": {"max_sequences": 3}}
    assert load_bases(values, environ={}) == (load_config(values, environ={}),)


def test_each_base_has_its_own_settings_and_what_is_common(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "engine": {"lora_pool_rows": 64, "cpu": {"num_threads": 2}},
        "adapters": {"max_rank": 8, "state_dir": str(tmp_path)},
        "tenants": {"prices": {"b": {"input": 1.0}}},
        "bases": [
            {"model": A, "adapters": {"max_rank": 16}},
            {"model": B, "engine": {"cpu": {"num_threads": 1}, "num_kv_blocks": 99}},
        ],
    }
    first, second = load_bases(values, environ={})
    assert (first.model.name, second.model.name) == ("a", "b")
    assert (first.adapters.max_rank, second.adapters.max_rank) == (16, 8)
    assert [each.engine.lora_pool_rows for each in (first, second)] == [64, 64]
    assert second.engine.cpu is not None
    assert (second.engine.cpu.num_threads, second.engine.num_kv_blocks) == (1, 99)
    assert second.tenants.prices == first.tenants.prices
    assert values["engine"] == {"lora_pool_rows": 64, "cpu": {"num_threads": 2}}, "the file's values are not changed"


def test_the_registry_with_the_projects_is_found_whatever_the_arithmetic_of_its_base_model(tmp_path: Path) -> None:
    bases = [{"model": A, "engine": {"cpu": {"compute": "int8"}}}, {"model": B}]
    first, second = load_bases({"adapters": {"state_dir": str(tmp_path)}, "bases": bases})
    assert second.tenants_store_key == first.store_key
    assert (second.for_store.tenants.base_uri, second.for_store.tenants.base_compute) == ("/models/a", "int8")


def test_the_first_registry_has_the_projects_of_all(tmp_path: Path) -> None:
    first, second = load_bases({"adapters": {"state_dir": str(tmp_path)}, "bases": [{"model": A}, {"model": B}]})
    alone = load_config({"adapters": {"state_dir": str(tmp_path)}, "model": A})
    assert first == alone, "a service that gets a second base model keeps what it has"
    assert second.tenants.base_uri == first.model.uri
    assert second.store_key != first.store_key
    assert second.tenants_store_key == first.tenants_store_key == first.store_key
    assert usage_folder(second) == usage_folder(first)
    for_store = AppConfig.model_validate_json(second.for_store.model_dump_json())
    assert (for_store.tenants.base_uri, for_store.store_key) == (first.model.uri, second.store_key)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"bases": []}, "bases is not a list of base models"),
        ({"bases": {"a": {}}}, "bases is not a list of base models"),
        ({"bases": [{"model": A}, {"model": B, "http": {}}]}, r"bases\[1\].http: an entry has only model, engine"),
        ({"bases": [{"model": A}, {"model": B, "engin": {}}]}, "did you mean 'engine'"),
        ({"bases": [{"model": A}, {"model": {"nam": "b"}}]}, r"bases\[1\]: .*model.nam is an unknown key"),
        ({"bases": [{"model": A}, {"model": A}]}, "entries 0 and 1 have the same model.uri /models/a"),
        ({"bases": [{"model": A}, {"model": B | {"name": "a"}}]}, "both have the name 'a'"),
        (
            {
                "bases": [
                    {"model": A, "adapters": {"preload": [{"name": "x", "path": "x"}]}},
                    {"model": B, "adapters": {"preload": [{"name": "x", "path": "x"}]}},
                ]
            },
            "both have the name 'x'",
        ),
        ({"bases": [{"model": A}, {"model": B, "adapters": {"state_dir": "/elsewhere"}}]}, "a database of its own"),
        ({"model": A, "tenants": {"base_uri": "/b"}}, "tenants.base_uri is set by bases"),
    ],
)
def test_what_cannot_be_one_service_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_bases(values, environ={})


def test_the_shipped_file_has_two_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (application,) = read_document(ROOT / "configs/serve-two-bases.yaml")["applications"]
    first, second = load_bases(application["args"], environ={})
    assert [adapter.name for adapter in first.adapters.preload] == ["sql", "extract", "support", "tools"]
    assert (first.model.name, second.model.name) == ("smollm2-135m-instruct", "gemma-3-270m")
