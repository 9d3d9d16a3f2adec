"""The engine's settings: one section for the device, each complaint with the place where the key belongs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from app.engine.config import CpuConfig, CudaConfig, DeviceConfig, EngineConfig, XlaConfig
from app.engine.errors import ConfigError

SECTIONS: list[DeviceConfig] = [
    CpuConfig(num_threads=3),
    CudaConfig(index=1, dtype="float32"),
    XlaConfig(platform="tpu", tensor_parallel=4),
]


@pytest.mark.parametrize("section", ["cuda", "xla"])
def test_speculative_decoding_is_refused_by_name_where_they_cannot_be_verified(section: str) -> None:
    with pytest.raises(ValidationError, match=rf"engine.speculative_decoding is 4, but engine.{section} cannot verify"):
        EngineConfig.model_validate({"speculative_decoding": 4, section: {}})
    assert EngineConfig.model_validate({section: {}}).speculative_decoding == "auto"


def test_yaml_s_off_switches_speculative_decoding_off() -> None:
    assert EngineConfig.model_validate(yaml.safe_load("speculative_decoding: off")).speculative_decoding == "off"
    for wrong in (True, 0, 17, "on"):
        with pytest.raises(ValidationError, match="speculative_decoding"):
            EngineConfig.model_validate({"speculative_decoding": wrong})


def test_the_cpu_is_the_default() -> None:
    assert EngineConfig() == EngineConfig(cpu=CpuConfig()) == EngineConfig.model_validate({"cpu": {}})
    assert EngineConfig().device == CpuConfig()


@pytest.mark.parametrize("device", SECTIONS, ids=lambda device: device.name)
def test_a_section_is_set_by_its_key_and_survives_being_written(device: DeviceConfig) -> None:
    values: dict[str, Any] = {device.name: device.model_dump(), "num_kv_blocks": 7}
    config = EngineConfig.model_validate(values)
    assert config.device == device
    assert config.section(type(device)) == device
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    assert EngineConfig(num_kv_blocks=7).on(device) == config
    assert config.on(CpuConfig()) == EngineConfig(num_kv_blocks=7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cpu": {}, "cuda": {}}, "on one device, but engine.cpu and engine.cuda are set"),
        ({"cuda": None}, "engine.cuda is empty; write cuda: {} for its defaults"),
        ({"xla": {"num_threads": 2}}, r"xla.num_threads\n  Extra inputs"),
        ({"cpu": {"tensor_parallel": 2}}, r"cpu.tensor_parallel\n  Extra inputs"),
        ({"max_lora_rank": 8}, r"max_lora_rank\n  Extra inputs"),
        ({"cuda": {"index": -1}}, r"cuda.index\n"),
        ({"merged_adapter": "auto"}, "engine.merged_adapter is 'auto', .* merging is not chosen automatically"),
    ],
)
def test_a_section_has_its_own_keys_and_no_others(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate(values)


def vllm(**settings: Any) -> EngineConfig:
    return EngineConfig.model_validate({"vllm": {"python": "python", **settings}})


def test_vllms_slots_are_rank_rows_of_their_size() -> None:
    config = vllm(max_loras=6, max_lora_rank=32)
    assert (config.lora_pool_rows, config.rank_alignment, config.max_loras, config.max_rank) == (192, 32, 7, 32)
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    assert config.on(CpuConfig()) == EngineConfig()


@pytest.mark.parametrize("name", ["num_kv_blocks", "block_size", "lora_pool_rows", "max_loras", "merged_adapter"])
def test_a_setting_that_vllm_has_its_own_of_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"engine.{name} has no effect on engine.vllm"):
        EngineConfig.model_validate({"vllm": {"python": "python"}, name: 16})


def test_vllms_host_tier_holds_at_least_its_slots() -> None:
    with pytest.raises(ValidationError, match="max_cpu_loras is 4"):
        vllm(max_loras=8, max_cpu_loras=4)


def test_vllms_interpreter_is_looked_for_before_anything_starts() -> None:
    vllm(python=sys.executable).check_installed()
    with pytest.raises(ConfigError, match=r"engine.vllm.python is '/no/such/python'"):
        vllm(python="/no/such/python").check_installed()
