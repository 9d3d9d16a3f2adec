"""The service's settings: checked before anything starts, each complaint naming its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.config import AppConfig, load_config
from app.deployments.registry.pins import PinLimits
from app.engine.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "modle is an unknown key; did you mean 'model'"),
        ({"engine": {"max_lora_rank": 8}}, r"engine\.max_lora_rank"),
        ({"engine": {"block_size": 7}}, r"engine\.block_size"),
        ({"placement": {"silence_s": 1.5}}, "at least twice report_interval_s"),
        ({"model": {"name": "a:b"}}, r"model\.name"),
        ({"adapters": {"preload": [{"name": "../x", "path": "x"}]}}, r"adapters\.preload\.0\.name"),
        ({"model": {"name": "x"}, "adapters": {"preload": [{"name": "x", "path": "y"}]}}, "'x' is used twice"),
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


def test_actors_are_renewed_only_by_what_concerns_them(tmp_path: Path) -> None:
    base = load_config({}, environ={})
    engine = load_config({"engine": {"num_kv_blocks": 64}}, environ={})
    placement = load_config({"placement": {"policy": "least_loaded"}}, environ={})
    roots = load_config({"adapters": {"roots": [str(tmp_path)]}}, environ={})
    assert base.store_key == engine.store_key == placement.store_key != roots.store_key


@pytest.mark.parametrize(
    "engine",
    [{"adapter_rank_rows": 64}, {"max_adapter_slots": 9}, {"adapter_extra_bytes": 1}, {"xla": {}}],
)
def test_a_store_of_other_engine_settings_is_another_store(engine: dict[str, Any]) -> None:
    """It decides what may be pinned."""
    base, changed = load_config({}, environ={}), load_config({"engine": engine}, environ={})
    assert base.store_key != changed.store_key
    assert PinLimits.of(changed.for_store) == PinLimits.of(changed)


def test_a_store_knows_only_what_its_key_covers() -> None:
    values = {"engine": {"num_kv_blocks": 64, "max_waiting": 3}, "limits": {"max_sequences": 2}}
    config = load_config(values, environ={})
    assert config.for_store == load_config({}, environ={}).for_store
    assert AppConfig.model_validate_json(config.for_store.model_dump_json()) == config.for_store
