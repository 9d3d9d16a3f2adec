"""Runs tests as on other x86-64 machines: `python -m load_tests.cpu_emulation [--machines NAME,…] [TEST …]`.

By default all machines and the tests that compare bits. Prints a Markdown table with a line per machine: how many tests
passed, and which failed; the status is 1 if a test failed. Torch, oneDNN, MKL, OpenBLAS, NumPy, Numba and XLA are each
limited by their own setting, so a machine can only be poorer than this one, and code for one maker's processors alone
is not covered.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from load_tests import avx2

_ROOT = Path(__file__).parent.parent
#: The tests that compare bits and take minutes, not hours, on one core.
TESTS = (
    "tests/engine/cuda/test_bit_identity.py", "tests/engine/cuda/test_extra_weights.py",
    "tests/engine/cuda/test_graphs.py",
    "tests/engine/cuda/test_sampling.py", "tests/kernels", "tests/engine/cpu/test_extra_weights.py",
    "tests/engine/cpu/test_narrow_rows.py", "tests/engine/cpu/test_weights.py",
    "tests/engine/cpu/test_weight_storage.py", "tests/engine/adapters/test_base_weight_dedup.py",
    "tests/engine/adapters/formats/test_peft_parity.py",
)  # fmt: skip
#: NumPy's groups of features beyond its baseline, poorest first.
_NUMPY_FEATURES = ("X86_V3", "X86_V4", "AVX512_ICL", "AVX512_SPR")


def _without_numpy(first: str) -> dict[str, str]:
    """Disable NumPy's feature `first` and those above it, and its warning about features that are missing."""
    lacking = _NUMPY_FEATURES[_NUMPY_FEATURES.index(first) :]
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(lacking), "PYTHONWARNINGS": "ignore::ImportWarning"}


#: Name -> environment variables. Numba's kernels need fused multiply-adds: its machines begin with Haswell.
MACHINES: Mapping[str, Mapping[str, str]] = {
    "this": {},
    "one thread": {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    "five threads": {"OMP_NUM_THREADS": "5", "OPENBLAS_NUM_THREADS": "5"},
    "sse4.2": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
        "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2",
        **_without_numpy("X86_V3"),
    },
    "haswell": {
        **avx2.ENVIRONMENT,
        "OPENBLAS_CORETYPE": "Haswell",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        **_without_numpy("X86_V4"),
    },
    "skylake-x": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "OPENBLAS_CORETYPE": "SkylakeX",
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": "",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX512",
        **_without_numpy("AVX512_ICL"),
    },
    "mkl compatible": {"MKL_CBWR": "COMPATIBLE", "OPENBLAS_CORETYPE": "Zen"},
}


class Result(NamedTuple):
    """What pytest says of one machine: its last line, and the names of tests that failed."""

    summary: str
    failed: Sequence[str]


def run(machine: str, tests: Sequence[str]) -> Result:
    """The tests in a process of their own. Raises RuntimeError where pytest could not run them at all."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=_ROOT, env=os.environ | MACHINES[machine], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with status {done.returncode} as on {machine!r}:\n{done.stdout[-3000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return Result(done.stdout.strip().splitlines()[-1], failed)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default=",".join(MACHINES), help="comma-separated: %(default)s")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="pytest's arguments instead of the usual tests")
    given, further = parser.parse_known_args(arguments)
    machines = given.machines.split(",")
    if unknown := set(machines) - MACHINES.keys():
        parser.error(f"no such machine: {', '.join(sorted(unknown))}; there are {', '.join(MACHINES)}")
    print("| as on | result | failed |\n|---|---|---|", flush=True)
    num_failed = 0
    for machine in machines:
        result = run(machine, [*(given.tests or TESTS), *further])
        num_failed += len(result.failed)
        print(f"| {machine} | {result.summary} | {', '.join(result.failed)} |", flush=True)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
