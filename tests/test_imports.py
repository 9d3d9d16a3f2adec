"""Imports point down only: deployments → engine → kernels, and value types ← policy ← engine inside."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Folder -> what of `app` it may import: the engine runs without the service, and kernels without the engine.
MAY_IMPORT = {
    "app.kernels": ("app.kernels",),
    "app.engine": ("app.engine", "app.kernels"),
}
#: Folders of the engine that decide: whose turn it is, who holds what.
POLICY = ("app.engine.scheduling", "app.engine.pools")
#: Folders of the engine that hold what is known of models and adapters.
KNOWLEDGE = ("app.engine.models", "app.engine.adapters")

#: (where, what it must not import), unless listed in `EXCEPT`
FORBIDDEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("app.kernels", ("ray", "fastapi")),
    ("app.engine", ("jax", "torch", "ray", "fastapi")),
    ("app.simulation", ("ray", "fastapi")),
    ("app.deployments", ("app.main", "app.cli", "app.simulation")),
)
EXCEPT = {
    ("app.engine.cuda", "torch"),
    ("app.engine.xla", "jax"),
}


#: Parts of a service that a process is made of have such names: Serve's deployments, and actors.
PROCESSES = ("deployment", "actor")


def is_in(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


@functools.cache
def imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "app").rglob("*.py"))
}


def test_imports_point_down() -> None:
    for module, imported in every_import():
        for place, own in MAY_IMPORT.items():
            if is_in(module, place) and is_in(imported, "app"):
                assert any(is_in(imported, each) for each in own), f"{module} imports {imported}"
        for place, prefixes in FORBIDDEN:
            for prefix in prefixes:
                allowed = any(is_in(module, a) and is_in(imported, b) for a, b in EXCEPT)
                wrong = is_in(module, place) and is_in(imported, prefix) and not allowed
                assert not wrong, f"{module} imports {imported}"


def every_import() -> Iterator[tuple[str, str]]:
    """Each module with each of its imports."""
    return ((module, imported) for module, path in MODULES.items() for imported in imports(path))


@functools.cache
def module_of(imported: str) -> str | None:
    """The module of ours that an imported name is or lies in."""
    return imported if imported in MODULES else module_of(imported.rpartition(".")[0]) if "." in imported else None


@functools.cache
def reached(module: str) -> frozenset[str]:
    """Everything that importing a module may bring in, itself included: modules of ours, and others' names."""
    found, left = {module}, [module]
    while left:
        for imported in imports(MODULES[left.pop()]):
            ours = module_of(imported)
            if ours is not None and ours not in found:
                left.append(ours)
            found.add(ours or imported)
    return frozenset(found)


def reaches(module: str, places: tuple[str, ...]) -> bool:
    return any(is_in(each, place) for each in reached(module) for place in places)


#: A folder of the engine with a backend in it is a device's.
DEVICES = tuple(
    module.removesuffix(".backend")
    for module in MODULES
    if module.startswith("app.engine.") and module.count(".") == 3 and module.endswith(".backend")
)


def folder(name: str) -> list[str]:
    return [module for module in MODULES if is_in(module, name)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_sees_values_and_no_policy(device: str) -> None:
    """It may import what neither decides nor knows who does, and no other device's modules."""
    others = tuple(other for other in DEVICES if other != device)
    for module in folder(device):
        for place in (*POLICY, *others):
            assert not reaches(module, (place,)), f"{module} reaches {place}"


def test_one_module_knows_the_devices() -> None:
    for device in DEVICES:
        users = {module for module in MODULES for name in imports(MODULES[module]) if is_in(name, device)}
        outside = {module for module in users if not any(is_in(module, each) for each in DEVICES)}
        assert outside <= {"app.engine.factory"}, f"{outside} import {device}"


def test_what_is_known_of_models_and_adapters_decides_nothing_and_has_no_device() -> None:
    for module in (module for place in KNOWLEDGE for module in folder(place)):
        for place in (*POLICY, *DEVICES):
            assert not reaches(module, (place,)), f"{module} reaches {place}"


def test_sequences_are_below_whoever_works_on_them() -> None:
    above = ("app.engine.scheduling", "app.engine.spec_decode", "app.engine.structured_output")
    assert not reaches("app.engine.sequence", above)
    for module in folder("app.engine.pools"):
        assert not reaches(module, ("app.engine.sequence", "app.engine.scheduling.schedule")), module


def test_policy_knows_nobody_who_uses_it() -> None:
    """Nothing below scheduling knows of it; pools are below it; and neither has a device."""
    for module in folder("app.engine.pools"):
        assert not reaches(module, ("app.engine.scheduling", *DEVICES)), module
    for module in folder("app.engine.scheduling"):
        assert not reaches(module, DEVICES), module
        below = {each for each in reached(module) if each in MODULES and not is_in(each, "app.engine.scheduling")}
        for each in below:
            assert not reaches(each, ("app.engine.scheduling",)), f"{module} reaches {each}, which is above it"


#: Folders of `app.deployments`, the lowest layer first: a folder imports folders of lower layers only.
LAYERS = (("rpc",), ("registry",), ("tenancy", "object_storage"), ("store",), ("placement",), ("replica", "ingress"))


def deployment_of(name: str) -> str | None:
    """The folder of `app.deployments` that a module, or an imported name, lies in."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["app", "deployments"] and len(parts) > 3 else None


def test_every_folder_of_the_deployments_has_a_layer() -> None:
    folders = {path.parent.name for path in (ROOT / "app/deployments").glob("*/__init__.py")}
    assert folders == {name for layer in LAYERS for name in layer}


def test_a_deployment_imports_only_what_is_below_it() -> None:
    layer_of = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    for module, imported in every_import():
        home, other = deployment_of(module), deployment_of(imported)
        if home is not None and other is not None and other != home:
            assert layer_of[other] < layer_of[home], f"{module} imports {imported}"


def test_the_door_imports_the_ingress_and_never_the_reverse() -> None:
    """Only the deployment, which wires a process, opens the door (`http`); what ingress decides it knows without."""
    door = "app.deployments.ingress.http"
    inside = [module for module in folder("app.deployments.ingress") if not is_in(module, door)]
    users = {module for module in inside if any(is_in(name, door) for name in imports(MODULES[module]))}
    assert users == {"app.deployments.ingress.deployment"}


@pytest.mark.parametrize(
    ("device", "libraries"), [("cpu", ("torch", "triton", "jax")), ("cuda", ("jax",)), ("xla", ())]
)
def test_a_device_brings_in_no_other_ones_libraries(device: str, libraries: tuple[str, ...]) -> None:
    for module in folder(f"app.engine.{device}"):
        for library in libraries:
            assert not reaches(module, (library,)), f"{module} reaches {library}"


def test_no_module_comes_back_to_itself() -> None:
    for module, path in MODULES.items():
        imported = {module_of(name) for name in imports(path)} - {None, module}
        back = [name for name in imported if name is not None and module in reached(name)]
        assert not back, f"{module} imports {back}, which import it again"


def class_lines(source: str) -> dict[str, int]:
    """The number of lines of each class."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in classes}


def test_no_class_is_longer_than_300_lines() -> None:
    """A longer one hides a second idea."""
    assert class_lines("class One:\n    x = 1\n\n    class Two:\n        y = 2\n") == {"One": 5, "Two": 2}
    lines = {
        f"{module}.{name}": n for module, path in MODULES.items() for name, n in class_lines(path.read_text()).items()
    }
    assert {name: n for name, n in lines.items() if n > 300} == {}


def test_the_walk_sees_what_it_should() -> None:
    assert DEVICES == ("app.engine.cpu", "app.engine.cuda", "app.engine.xla")
    assert "app.engine.pools.block_pool.BlockPool" in imports(MODULES["app.engine.scheduling.scheduler"])
    assert reaches("app.engine.factory", ("app.engine.scheduling", "jax")), "through the functions that import late"
    assert reaches("app.engine.batch_builder", POLICY), "through the sequence's blocks"
    assert not reaches("app.engine.batch", POLICY)
    assert len(MODULES) > 20


def test_vllms_worker_stands_alone() -> None:
    """It runs in vLLM's environment; nothing else imports vLLM, and only the factory the engine in front of it."""
    worker = {"app.engine.vllm.worker", "app.engine.vllm.cpu_lora"}
    assert not any(is_in(name, "app") for module in worker for name in imports(MODULES[module]))
    users = {module for module, name in every_import() if is_in(name, "vllm") or is_in(name, "msgspec")}
    assert users == worker
    outside = {module for module, name in every_import() if is_in(name, "app.engine.vllm")} - set(
        folder("app.engine.vllm")
    )
    assert outside == {"app.engine.factory"}


#: Up to seconds each, in processes that have to be up before the service answers.
HEAVY = {
    *("torch", "numba", "triton", "jax", "transformers", "scipy", "pandas", "pyarrow"),
    *("sqlalchemy", "cryptography", "huggingface_hub", "fsspec"),
}


#: Prints which modules of HEAVY a process has, and which names its public classes share.
OBSERVE = """
import importlib, sys
for module in sys.argv[2:]:
    importlib.import_module(module)
found = {}
for name, module in list(sys.modules.items()):
    for kind in vars(module).values() if name.startswith("app.") else ():
        if isinstance(kind, type) and kind.__module__ == name and not kind.__name__.startswith("_"):
            found.setdefault(kind.__name__, []).append(name)
print(sorted(set(sys.argv[1].split()) & sys.modules.keys()))
print({name: modules for name, modules in found.items() if len(modules) > 1})
"""


def observed(*modules: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", OBSERVE, " ".join(HEAVY), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "module",
    ["app.main", "app.cli.serve", *(module for module in MODULES if module.rpartition(".")[2] in PROCESSES)],
)
def test_a_process_of_the_service_starts_without_what_it_may_never_need(module: str) -> None:
    """And no two of its classes have one name."""
    assert observed(module) == ["[]", "{}"]


def test_what_the_store_opens_has_a_name_for_each_class() -> None:
    _, shared = observed(
        "app.deployments.store.actor", "app.deployments.store.factory", "app.deployments.object_storage.storage"
    )
    assert shared == "{}"
