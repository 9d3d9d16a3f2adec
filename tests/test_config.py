"""The service's settings: checked before anything starts, each complaint naming its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.config import AppConfig, load_config
from app.deployments.registry.pins import PinLimits
from app.deployments.registry.registry import database_url
from app.engine.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "modle is an unknown key; did you mean 'model'"),
        ({"engine": {"jax": {}}}, "engine.jax is an unknown key$"),
        (
            {"engine": {"gpu_memory_utilization": 0.5}},
            r"engine.gpu_memory_utilization is an unknown key; did you mean 'cuda\.gpu_memory_utilization' "
            r"or 'vllm\.gpu_memory_utilization'\?",
        ),
        (
            {"engine": {"weight_dtype": "int8"}},
            r"weight_dtype is an unknown key; did you mean 'cpu\.weight_dtype'\?",
        ),
        ({"engine": {"max_lora_rank": 8}}, r"engine\.max_lora_rank"),
        ({"engine": {"block_size": 7}}, r"engine\.block_size"),
        ({"placement": {"heartbeat_timeout_s": 1.5}}, "at least twice report_interval_s"),
        ({"model": {"name": "a:b"}}, r"model\.name"),
        ({"adapters": {"preload": [{"name": "../x", "path": "x"}]}}, r"adapters\.preload\.0\.name"),
        ({"model": {"name": "x"}, "adapters": {"preload": [{"name": "x", "path": "y"}]}}, "'x' is used twice"),
        (
            {"adapters": {"preload": [{"name": "x", "path": "y", "description": "z" * 1001}]}},
            r"adapters\.preload\.0\.description.* 1000 characters",
        ),
        ({"adapters": {"roots": ["/nonexistent/folder"]}}, "/nonexistent/folder is not a folder"),
    ],
)
def test_bad_settings_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(values, environ={})


def test_the_environment_adds_a_root_and_moves_the_state(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    environ = {"LORA_PATH": str(tmp_path / "b"), "POLYLORA_STATE_DIR": str(tmp_path / "state")}
    config = load_config({"adapters": {"roots": [str(tmp_path / "a"), str(tmp_path / "a")]}}, environ=environ)
    assert config.adapters.roots == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert config.adapters.state_dir == str(tmp_path / "state")
    assert AppConfig.model_validate_json(config.model_dump_json()) == config


def test_a_store_is_one_for_each_database_and_base_model(tmp_path: Path) -> None:
    base = load_config({}, environ={})
    for values in (
        {"engine": {"num_kv_blocks": 64}},
        {"engine": {"lora_pool_rows": 64, "xla": {}}},
        {"engine": {"cpu": {"kv_cache_dtype": "float32"}}},
        {"placement": {"policy": "least_loaded"}},
        {"adapters": {"roots": [str(tmp_path)], "preload": [{"name": "x", "path": "x"}], "host_cache_bytes": 1 << 20}},
        {"model": {"name": "other"}},
    ):
        assert load_config(values, environ={}).store_key == base.store_key, values
    for values in (
        {"adapters": {"state_dir": str(tmp_path)}},
        {"model": {"uri": "/elsewhere"}},
        {"engine": {"cpu": {"compute": "int8"}}},
        {"engine": {"cpu": {"kv_cache_dtype": "bfloat16"}}},
    ):
        assert load_config(values, environ={}).store_key != base.store_key, values
    urls = {
        "POLYLORA_REGISTRY_URL": [
            "postgresql://ada:old@db/registry",
            "postgresql://ada:new@db/registry?connect_timeout=3",
            "postgresql+psycopg://bob@db/registry?password=secret",
        ],
    }
    keys = {load_config({}, environ={name: url}).store_key for name, values in urls.items() for url in values}
    assert len(keys) == 1, "whoever asks, and with whatever password"
    others = [
        "postgresql://db2/registry",
        "postgresql://db/other",
        "postgresql:///registry?host=/run/a",
        "sqlite:////a/b",
    ]
    keys |= {load_config({}, environ={"POLYLORA_REGISTRY_URL": url}).store_key for url in others}
    assert len(keys | {base.store_key}) == 6


@pytest.mark.parametrize("engine", [{"lora_pool_rows": 64}, {"max_loras": 9}, {"extra_weights_bytes": 1}])
def test_a_store_knows_what_may_be_pinned(engine: dict[str, Any]) -> None:
    changed = load_config({"engine": engine}, environ={})
    assert PinLimits.of(changed.for_store) == PinLimits.of(changed)


@pytest.mark.parametrize("cpu", [{"compute": "int8"}, {"weight_dtype": "int8"}, {"kv_cache_dtype": "bfloat16"}])
def test_a_store_reads_adapters_for_the_arithmetic_of_its_engines(cpu: dict[str, str]) -> None:
    config = load_config({"engine": {"cpu": {**cpu, "num_threads": 2}}}, environ={})
    assert config.for_store.engine.arithmetic == config.engine.arithmetic != "float32"
    assert config.for_store.store_key == config.store_key


def test_a_databases_password_stays_in_the_environment() -> None:
    url = "postgresql://ada:s%40cret@db:5433/registry?sslmode=require&password=secret"
    config = load_config({}, environ={"POLYLORA_REGISTRY_URL": url})
    assert config.adapters.registry_url == "postgresql://ada@db:5433/registry?sslmode=require"
    assert "cret" not in config.model_dump_json()
    assert database_url(config.adapters, "base", {"POLYLORA_REGISTRY_URL": url}) == url
    assert database_url(config.adapters, "base", {}) == config.adapters.registry_url
    other = {"POLYLORA_REGISTRY_URL": "postgresql://ada:secret@elsewhere/registry"}
    assert database_url(config.adapters, "base", other) == config.adapters.registry_url, "meant for another"
    for text in (url, "postgresql://ada:secret@db/registry"):
        with pytest.raises(ConfigError, match=r"holds a password, .* POLYLORA_REGISTRY_URL") as caught:
            load_config({"adapters": {"registry_url": text}}, environ={})
        assert "secret" not in str(caught.value)


def test_a_store_knows_only_what_its_key_covers() -> None:
    values = {"engine": {"num_kv_blocks": 64, "max_queued_requests": 3}, "limits": {"max_sequences": 2}}
    config = load_config(values, environ={})
    assert config.for_store == load_config({}, environ={}).for_store
    assert AppConfig.model_validate_json(config.for_store.model_dump_json()) == config.for_store
