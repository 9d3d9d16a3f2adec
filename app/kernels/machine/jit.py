"""Compilation of CPU kernels: Numba, without the GIL, cached on disk between starts.

A function is compiled at its first call. The cache lies under POLYLORA_CACHE (default ~/.cache/polylora) in a folder
named after the hash of the source files that hold compiled functions (the kernels and the CPU engine, without the forms
for other compilers): Numba itself only watches the file that defines a function, and would keep code that inlines a
changed callee.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

from app.kernels.machine.disk_cache import default_cache_dir, source_digest
from app.kernels.machine.jit_inline import KernelDispatcher

#: Kernels for other compilers, and definitions: they contribute nothing to Numba's code.
_OTHER_FORMS = ("torch", "triton", "xla", "pallas", "reference")

#: Folders of the package whose functions call one another as compiled code.
_COMPILED = ("kernels", "engine/cpu")

#: How long a process waits for one that compiles the same kernels; then it compiles them, too.
_WAIT_S = 600.0
#: How long one waits that saves a kernel, which takes milliseconds.
_SAVE_WAIT_S = 10.0

_LOGGER = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _cache_folder() -> Path:
    digest = source_digest(Path(__file__).parents[2], _COMPILED, _OTHER_FORMS)
    return default_cache_dir() / "kernels" / digest[:16]


numba.config.CACHE_DIR = str(_cache_folder())

_compiling = event.TimingListener()
event.register("numba:compile", _compiling)


@contextmanager
def compile_lock(*arguments: object) -> Iterator[None]:
    """Held by one process of the machine that compiles a kernel for arguments of these types: another one that starts
    meanwhile finds it cached.
    """
    key = hashlib.sha256(str(numba.typeof(arguments)).encode()).hexdigest()[:16]
    with _file_lock(Path(numba.config.CACHE_DIR) / f"{key}.lock", _WAIT_S):
        yield


@contextmanager
def _file_lock(path: Path, wait_s: float) -> Iterator[None]:
    """Held by one process of the machine at a time; without that after `wait_s`, or where files cannot be locked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + wait_s
    with path.open("w") as file:
        while time.monotonic() < until_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError as error:
                _warn_once(f"the kernel cache cannot be locked, so several processes may compile the same: {error}")
                break
        yield


@cache
def _warn_once(text: str) -> None:
    _LOGGER.warning(text)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one kernel, written by one process at a time.

    Numba numbers compiled forms by an index that it reads and writes without a lock. Two processes that save different
    forms at once would give both the same number, and one form's entry would lead to the code of the other.
    """

    def save_overload(self, sig: Any, data: Any) -> None:
        """Add a compiled form."""
        with _file_lock(Path(self.cache_path) / "index.lock", _SAVE_WAIT_S):
            super().save_overload(sig, data)


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
    kernel._cache = _KernelCache(function)
    return kernel


def has_feature(name: str) -> bool:
    """Whether code is compiled for a CPU with this feature, by LLVM's name: "avx512f"."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{name}" in features.split(",")
