"""Compile every kernel launch for an H200 on a machine without one: to PTX and machine code, nothing is run.

A stub stands where the CUDA driver would be, and a launch `kernel[grid](...)` compiles instead of running, so what is
compiled is what the Python functions pass on: types, strides and configurations included. Run in a process of its
own, without TRITON_INTERPRET: `python -m tests.kernels.triton.compiling`; prints one JSON object per launch.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.kernels.triton.launches import launches


class _NoDriver:
    """What the compiler asks a driver; an H200's answers."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@contextmanager
def compiling_launches(seen: Callable[[str, Any], None]) -> Iterator[None]:
    """Launches inside compile for sm_90 and call seen(kernel name, compiled kernel)."""

    def compile_only(kernel: JITFunction[Any], grid: tuple[int, ...]) -> Callable[..., None]:
        assert max(grid[1:], default=0) < 65536, f"{kernel.__name__}: grid {grid}"

        def launch(*args: Any, **kwargs: Any) -> None:
            seen(kernel.__name__, kernel.warmup(*args, grid=grid, **kwargs))

        return launch

    driver, launching = triton.runtime.driver._active, JITFunction.__getitem__
    triton.runtime.driver._active = _NoDriver()
    JITFunction.__getitem__ = compile_only
    try:
        yield
    finally:
        triton.runtime.driver._active, JITFunction.__getitem__ = driver, launching


def resources(kernel: Any) -> dict[str, int]:
    """Registers, bytes of shared memory and of stack (spills), and how many instructions of some kinds there are."""
    ptx = kernel.asm["ptx"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"(REG|STACK):(\d+)", text.stdout))
    return {
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
        "shared": kernel.metadata.shared,
        "tensor_core": len(re.findall(r"mma(?:_async)?\.sync", ptx)),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global .*, 0x10", ptx)),
        "atomics": len(re.findall(r"\batom\.|\bred\.", ptx)),
    }


def main() -> None:
    for case, launch in launches():

        def report(kernel: str, built: Any, case: str = case) -> None:
            print(json.dumps({"case": case, "kernel": kernel, **resources(built)}), flush=True)

        with compiling_launches(report):
            launch()


if __name__ == "__main__":
    main()
