"""Compilation of CPU kernels: Numba, without the GIL, cached on disk between starts.

A function is compiled at its first call. The cache lies under POLYLORA_CACHE (default ~/.cache/polylora) in a folder
named after the hash of the source files that hold compiled functions (the kernels and the CPU engine, without the forms
for other compilers): Numba itself only watches the file that defines a function, and would keep code that inlines a
changed callee.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import event
from numba.core.registry import cpu_target

from app.kernels.machine.jit_inline import KernelDispatcher

#: Kernels for other compilers, and definitions: they contribute nothing to Numba's code.
_OTHER_FORMS = ("torch", "triton", "xla", "pallas", "reference")

#: Folders of the package whose functions call one another as compiled code.
_COMPILED = ("kernels", "engine/cpu")

#: How long a process waits for one that compiles the same kernels; then it compiles them, too.
_WAIT_S = 600.0

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _cache_folder() -> Path:
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for source in sorted(source for folder in _COMPILED for source in (root / folder).rglob("*.py")):
        if source.stem in _OTHER_FORMS:
            continue
        digest.update(str(source.relative_to(root)).encode())
        digest.update(source.read_bytes())
    base = Path(os.environ.get("POLYLORA_CACHE") or Path.home() / ".cache" / "polylora")
    return base / "kernels" / digest.hexdigest()[:16]


numba.config.CACHE_DIR = str(_cache_folder())

_compiling = event.TimingListener()
event.register("numba:compile", _compiling)


@contextmanager
def compile_lock(*arguments: object) -> Iterator[None]:
    """Held by one process of the machine that compiles a kernel for arguments of these types: another one that starts
    meanwhile finds it cached.
    """
    folder = Path(numba.config.CACHE_DIR)
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(str(numba.typeof(arguments)).encode()).hexdigest()[:16]
    until_s = time.monotonic() + _WAIT_S
    with (folder / f"{key}.lock").open("w") as file:
        while time.monotonic() < until_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


def compile_seconds() -> float:
    """Seconds that this process has spent compiling; cache hits cost none."""
    return float(_compiling.duration) if _compiling.done else 0.0


def jit(function: _Function) -> _Function:
    """Compile a function for this machine's CPU, and into every compiled function that calls it.

    Contraction and reassociation stay off: the order of every sum is the order written, so that a row's bits are
    the same wherever it is computed.
    """
    options = {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
    kernel = KernelDispatcher(function, targetoptions=options)
    kernel.enable_caching()
    return kernel


def has_feature(name: str) -> bool:
    """Whether code is compiled for a CPU with this feature, by LLVM's name: "avx512f"."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{name}" in features.split(",")
