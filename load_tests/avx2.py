"""Runs a measurement limited to AVX2: `python -m load_tests.avx2 engine.bench_engine --streams 32 ...`.

Numba, torch, oneDNN, MKL and vLLM are each limited by their own setting.
"""

from __future__ import annotations

import os
import sys

#: Numba takes a processor's name: Haswell was the first with AVX2 and fused multiply-adds.
ENVIRONMENT = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def is_limited() -> bool:
    """Whether this process is limited to AVX2."""
    return all(os.environ.get(name) == value for name, value in ENVIRONMENT.items())


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("name a module of load_tests, for example: python -m load_tests.avx2 engine.bench_engine --streams 32")
    _, module, *arguments = sys.argv
    command = [sys.executable, "-m", f"load_tests.{module}", *arguments]
    os.execve(sys.executable, command, os.environ | ENVIRONMENT)


if __name__ == "__main__":
    main()
