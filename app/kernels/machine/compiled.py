"""How CPU kernels are compiled: Numba, without the GIL, cached on disk between starts.

The cache lives under POLYLORA_CACHE (default ~/.cache/polylora) in a folder named after the hash of
this package's source files, forms for other compilers apart: Numba itself only watches the file a function
stands in, and would keep code that has a changed callee compiled in.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.registry import cpu_target

#: Kernels for other compilers, and definitions: none of Numba's code comes from them.
_OTHER_FORMS = ("torch", "triton", "xla", "pallas", "reference")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _cache_folder() -> Path:
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for source in sorted(root.rglob("*.py")):
        if source.stem in _OTHER_FORMS:
            continue
        digest.update(str(source.relative_to(root)).encode())
        digest.update(source.read_bytes())
    base = Path(os.environ.get("POLYLORA_CACHE") or Path.home() / ".cache" / "polylora")
    return base / "kernels" / digest.hexdigest()[:16]


numba.config.CACHE_DIR = str(_cache_folder())


def compiled(function: _Function) -> _Function:
    """Compile a function for this machine's CPU. Contraction and reassociation stay off: the order of
    every sum is the order written, so that a row's bits are the same wherever it is computed."""
    return numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)


def has_feature(name: str) -> bool:
    """Whether code is compiled for a machine with this feature, by LLVM's name: "avx512f"."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{name}" in features.split(",")
