"""The stages of `gpu_check`: processes, each with a limit of seconds, and how they are run.

Stages are ordered by value: correctness before speed, the engine's steps (which the targets are about) before single
kernels, and after the search for configurations the steps once more. A stage's limit is below that of a call, so that
every stage fits one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
#: pytest's configuration without the suite's options for plug-ins that such a machine may lack.
_PYTEST_INI = "[pytest]\naddopts = -ra --import-mode=importlib -p no:cacheprovider\nmarkers =\n    e2e: not run here\n"
_KERNELS, _ENGINE = "tests/kernels", "tests/engine/cuda"
#: The tests that run on a device where there is one.
_KERNEL_TESTS = (
    f"{_KERNELS}/triton",
    *(f"{_KERNELS}/test_{name}.py" for name in ("norms", "rotary", "activation", "matmul")),
)
_ENGINE_TESTS = (
    "decoder",
    "extra_weights",
    "graphs",
    "adapters",
    "lora_tables",
    "sampling",
    "memory",
    "factory",
    "order",
    "triton",
    "mixtures",
)
#: One test of each kind, for a run without a GPU.
_SMALL_TESTS = {
    "kernel tests": (_KERNELS, f"{_KERNELS}/triton/test_interpreting.py", f"{_KERNELS}/test_norms.py"),
    "engine tests": (_ENGINE, f"{_ENGINE}/test_memory.py", f"{_ENGINE}/test_graphs.py", "-k", "fit or bound"),
}


@dataclass(slots=True)
class Part:
    """A process: its name and command, and the file of its result."""

    name: str
    command: list[str]
    result: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Stage:
    """Parts that run at the same time, and their time limit."""

    name: str
    limit_s: float
    parts: list[Part]


@dataclass(slots=True)
class Outcome:
    """How a part ended. `code` None: it was stopped at its limit."""

    name: str
    code: int | None
    took_s: float
    last_lines: list[str]
    result: Any = None

    @property
    def verdict(self) -> str:
        return "stopped at its limit" if self.code is None else "ok" if self.code == 0 else f"failed ({self.code})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def stages(out: Path, *, small: bool = False) -> list[Stage]:
    """All stages; `small`: those that need no GPU, with one test each and tiny sizes; steps need one."""
    ini = out / "pytest.ini"
    ini.write_text(_PYTEST_INI)
    # Threads that wait for each other are slower than one alone on a machine with other work.
    on_cpu = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def pytest(name: str, top: str, *arguments: str) -> Part:
        # Leave out the suite's conftest, above `top`: it needs a database client and sets Triton's interpreter.
        where = ["-c", str(ini), "--rootdir", str(ROOT), "--confcutdir", str(ROOT / top)]
        command = [sys.executable, "-m", "pytest", "-q", *where, *arguments]
        return Part(name, command, environment=on_cpu if small else {"POLYLORA_TEST_CUDA": "1"})

    def steps(name: str, *arguments: str) -> Part:
        result = out / f"{name.replace(' ', '_')}.json"
        return Part(name, [*_module("engine.bench_gpu"), *arguments, "--out", str(result)], result)

    def kernels(budget_s: int) -> Part:
        result = out / "kernels.jsonl"
        command = [*_module("kernels.bench_kernels"), "--budget-s", str(budget_s), "--json", str(result)]
        return Part("kernels", command, result, on_cpu if small else {})

    if small:
        tests = [pytest(name, *arguments) for name, arguments in _SMALL_TESTS.items()]
        return [Stage("tests", 3600, tests), Stage("kernels", 3600, [kernels(1)])]
    engine = [f"{_ENGINE}/test_{name}.py" for name in _ENGINE_TESTS]
    fuzz = f"{_ENGINE}/test_bit_identity.py"
    tuned = out / "tuned.json"
    tune = [*_module("kernels.bench_kernels"), "--tune", "--budget-s", "165", "--tuned", str(tuned)]
    return [
        Stage("kernel tests", 150, [pytest("kernel tests", _KERNELS, *_KERNEL_TESTS)]),
        Stage("engine tests", 180, [pytest("engine tests", _ENGINE, *engine)]),
        Stage("steps 1b", 150, [steps("steps 1b", "--shape", "1b")]),
        Stage("steps 8b", 240, [steps("steps 8b", "--shape", "8b")]),
        Stage("fuzz", 180, [pytest(f"bit identity {t}", _ENGINE, fuzz, "-k", t) for t in ("float32", "bfloat16")]),
        Stage("kernels", 200, [kernels(165)]),
        Stage("tuning", 200, [Part("tuning", tune, tuned)]),
        Stage("steps 8b, tuned", 240, [steps("steps 8b tuned", "--shape", "8b", "--tuned", str(tuned))]),
    ]


def run_together(stage: Stage, out: Path) -> list[Outcome]:
    """Run all parts at the same time; at the stage's limit a part is killed with its child processes."""
    running: list[tuple[Part, subprocess.Popen[bytes], IO[bytes]]] = []
    started = time.monotonic()
    for part in stage.parts:
        log: IO[bytes] = (out / _log_name(part)).open("wb")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths), **part.environment}
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment},
            start_new_session=True,
        )  # fmt: skip
        running.append((part, process, log))
    outcomes = []
    for part, process, log in running:
        code: int | None = None
        try:
            code = process.wait(max(1.0, started + stage.limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        log.close()
        lines = (out / _log_name(part)).read_text(errors="replace").splitlines()
        outcomes.append(Outcome(part.name, code, round(time.monotonic() - started, 1), lines[-40:], _result(part)))
    return outcomes


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", f"load_tests.{name}"]


def _log_name(part: Part) -> str:
    return f"{part.name.replace(' ', '_')}.log"


def _result(part: Part) -> Any:
    """The part's result; None if it has none, or wrote only half of it before it was stopped."""
    if part.result is None or not part.result.is_file():
        return None
    text = part.result.read_text()
    try:
        if part.result.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except json.JSONDecodeError:
        return None
