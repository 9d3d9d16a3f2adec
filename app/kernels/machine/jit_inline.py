"""The inlined form of a kernel: unoptimised LLVM code for other kernels to link, without machine code.

Numba optimises a function and generates machine code at every level of calls, so a decoder is compiled as often as its
call tree is deep, callees again within their callers. Code that only compiled code calls needs neither: it is optimised
once, in the kernel that Python calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher


class _NoEnvironment:
    """Numba's code generator without a slot for a function's environment, which only code with an address has."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, env_name: str, env: Any) -> None:
        """Do nothing: no machine code would read it."""


class _LinkedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """A function and all its callees as one module to link."""

    @property
    def codegen(self) -> Any:
        return _NoEnvironment(self._codegen)

    def get_pointer_to_function(self, name: str) -> int:  # noqa: ARG002
        """0: Numba's value for code without an address."""
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        """Do nothing: the kernel that links this code optimises it."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


class _LinkedCompiler(Compiler):  # type: ignore[misc]
    """Numba's pipeline with a `_LinkedLibrary`."""

    def __init__(
        self, typingctx: Any, targetctx: Any, library: Any, args: Any, return_type: Any, flags: Any, locals: Any
    ) -> None:
        library = library or _LinkedLibrary(targetctx.codegen(), "linked")
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)


class _InlinedDispatcher(CPUDispatcher):  # type: ignore[misc]
    """Compiles for compiled callers only: nothing is inserted into the table of calls from Python."""

    def _insert(self, sig: Any, entry_point: Any, cc: Any = None) -> None:
        pass


class KernelDispatcher(CPUDispatcher):  # type: ignore[misc]
    """Compiles, optimises and caches for calls from Python; compiled code gets the inlined form."""

    def __init__(self, py_func: Callable[..., Any], locals: Any = None, targetoptions: Any = None) -> None:
        options = targetoptions or {}
        super().__init__(py_func, locals or {}, options)
        inner = {**options, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        self._inlined = _InlinedDispatcher(py_func, locals or {}, inner, _LinkedCompiler)

    @property
    def _numba_type_(self) -> Any:
        return self._inlined._numba_type_
