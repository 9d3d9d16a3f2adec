"""Imports point down only: deployments → engine → kernels, and value types ← policy ← engine inside."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: What decides: whose turn it is, who holds what, the engine itself. Backends and value types do not see it.
POLICY = ("app.engine.scheduling", "app.engine.pools", "app.engine.engine", "app.engine.worker", "app.engine.api")
SERVICE = ("app.deployments", "app.main", "app.config", "app.cli", "ray", "fastapi")

#: (where, what it must not import), unless listed in `EXCEPT`
FORBIDDEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("app.kernels", ("app.engine", *SERVICE)),
    ("app.engine", ("jax", "torch", *SERVICE)),
    ("app.engine.cpu", ("app.engine.cuda", "app.engine.xla", *POLICY)),
    ("app.engine.cuda", ("app.engine.xla", *POLICY)),
    ("app.engine.xla", ("app.engine.cuda", *POLICY)),
    ("app.engine.models", POLICY),
    ("app.engine.adapters", POLICY),
)
EXCEPT = {
    ("app.engine.cuda", "torch"),
    ("app.engine.xla", "jax"),
}


def is_in(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "app").rglob("*.py"))
}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    for imported in imports(MODULES[module]):
        for place, prefixes in FORBIDDEN:
            for prefix in prefixes:
                allowed = any(is_in(module, a) and is_in(imported, b) for a, b in EXCEPT)
                wrong = is_in(module, place) and is_in(imported, prefix) and not allowed
                assert not wrong, f"{module} imports {imported}"


def test_the_walk_sees_what_it_should() -> None:
    assert "app.engine.pools.kv_blocks.BlockPool" in imports(MODULES["app.engine.scheduling.scheduler"])
    assert len(MODULES) > 20


#: Up to seconds each, in processes that have to be up before the service answers.
HEAVY = {
    *("torch", "numba", "triton", "jax", "transformers", "scipy", "pandas", "pyarrow"),
    *("sqlalchemy", "alembic", "cryptography", "huggingface_hub", "fsspec"),
}


@pytest.mark.parametrize(
    "module",
    [
        "app.main",
        "app.deployments.ingress.deployment",
        "app.deployments.replica.deployment",
        "app.deployments.store.actor",
        "app.deployments.placement.actor",
        "app.cli.serve",
    ],
)
def test_a_process_of_the_service_starts_without_what_it_may_never_need(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY!r} & sys.modules.keys()))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
