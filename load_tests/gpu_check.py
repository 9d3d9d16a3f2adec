"""One command on a machine with a GPU: check everything that needs one, then time it, within minutes.

In: a budget of seconds. Out: a folder with every log and result, and a short table last. Parts run as processes of
their own: what fails or hangs is reported and stops nothing else. Tests run side by side; timings then run alone, one
after the other. Exit status 1 if anything failed. It needs Python 3.11 or newer, torch with CUDA, triton, numba,
transformers, peft and pytest, but no Ray; wheels of what else is missing (pydantic, gguf) may lie in a folder:

    pip download --python-version 3.12 --only-binary :all: --platform manylinux2014_x86_64 --dest wheels pydantic
    pip download --no-deps --dest wheels gguf==0.19.0
    python -m load_tests.gpu_check --wheels wheels --budget-s 540 --out results
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
#: What the suite's own configuration asks of plug-ins that such a machine may not have is left out.
_PYTEST_INI = "[pytest]\naddopts = -ra --import-mode=importlib -p no:cacheprovider\nmarkers =\n    e2e: not run here\n"
_ENGINE_TESTS = ("decoder", "extras", "graphs", "adapters", "sampling", "memory", "loading", "triton")
_VERSIONS = ("torch", "triton", "numpy", "numba", "transformers", "peft", "pydantic", "pytest")


@dataclass(slots=True)
class Part:
    """A process: what it is, at most how long, and where its result file will lie."""

    name: str
    command: list[str]
    limit_s: float
    result: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)


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


def tests(out: Path, limit_s: float) -> list[Part]:
    """Kernels, engine and fuzz, on the device."""
    ini = out / "pytest.ini"
    ini.write_text(_PYTEST_INI)
    folder = "tests/engine/torch_backend"

    def pytest(name: str, top: str, *paths: str) -> Part:
        # The suite's own conftest is above `top`: it needs a database's client, and decides about the interpreter.
        where = ["-c", str(ini), "--rootdir", str(ROOT), "--confcutdir", str(ROOT / top)]
        command = [sys.executable, "-m", "pytest", "-q", *where, *paths]
        environment = {"POLYLORA_TEST_CUDA": "1", "PYTHONPATH": str(ROOT)}
        return Part(name, command, limit_s, environment=environment)

    engine = [f"{folder}/test_gpu_{name}.py" for name in _ENGINE_TESTS]
    return [
        pytest("kernel tests", "tests/kernels/triton", "tests/kernels/triton"),
        pytest("engine tests", folder, *engine),
        pytest("bit identity float32", folder, f"{folder}/test_gpu_bit_identity.py", "-k", "float32"),
        pytest("bit identity bfloat16", folder, f"{folder}/test_gpu_bit_identity.py", "-k", "bfloat16"),
    ]


def timings(out: Path, left_s: float) -> list[Part]:
    """The engine's steps first: they are what the targets are about; kernels get what is left."""
    parts = []
    for shape, share in (("8b", 0.45), ("1b", 0.25)):
        result = out / f"bench_gpu_{shape}.json"
        command = [sys.executable, "-m", "load_tests.bench_gpu", "--shape", shape, "--out", str(result)]
        parts.append(Part(f"steps {shape}", command, left_s * share, result))
    result = out / "bench_kernels.jsonl"
    budget_s = int(left_s * 0.22)
    command = [sys.executable, "-m", "load_tests.bench_kernels", "--budget-s", str(budget_s), "--json", str(result)]
    parts.append(Part("kernels", command, left_s * 0.3, result))
    return parts


def run_together(parts: list[Part], out: Path) -> list[Outcome]:
    """Start all, wait for all; each is ended at its limit, with what it has started."""
    running: list[tuple[Part, subprocess.Popen[bytes], IO[bytes], float]] = []
    for part in parts:
        log = (out / _log_name(part)).open("wb")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **part.environment}
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        running.append((part, process, log, time.monotonic()))
    outcomes = []
    for part, process, log, started in running:
        code: int | None = None
        try:
            code = process.wait(max(1.0, started + part.limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        log.close()
        lines = (out / _log_name(part)).read_text(errors="replace").splitlines()
        outcomes.append(Outcome(part.name, code, round(time.monotonic() - started, 1), lines[-40:], _result(part)))
    return outcomes


def install(wheels: Path) -> None:
    """Packages from a folder; nothing is fetched, and what is there already is kept."""
    files = [str(path) for path in sorted(wheels.glob("*.whl")) if not _is_installed(path.name)]
    if files:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *files]
        subprocess.run(command, check=True)


def machine() -> dict[str, Any]:
    """What it is run on."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "num_cpus": len(os.sched_getaffinity(0))}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none')"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found["gpu"] = asked.stdout.strip() or asked.stderr.strip()[-200:]
    return found


def table(found: dict[str, Any], outcomes: list[Outcome]) -> str:
    """One line per part, then what the parts measured."""
    from load_tests import bench_gpu  # after `install`

    versions = ", ".join(f"{key} {value}" for key, value in found.items())
    lines = [versions, "", "| part | | s |", "|---|---|---:|"]
    lines += [f"| {outcome.name} | {outcome.verdict} | {outcome.took_s} |" for outcome in outcomes]
    for outcome in outcomes:
        lines += ["", f"{outcome.name}:"]
        if outcome.code != 0:
            lines += outcome.last_lines[-12:]
        if isinstance(outcome.result, dict) and "shape" in outcome.result:
            lines.append(bench_gpu.table(outcome.result))  # what was measured before it was stopped, too
        elif outcome.code == 0:
            measured = [line for line in outcome.last_lines if line.startswith("|")]
            lines += measured or outcome.last_lines[-1:]
    return "\n".join(lines)


def _log_name(part: Part) -> str:
    return f"{part.name.replace(' ', '_')}.log"


def _result(part: Part) -> Any:
    if part.result is None or not part.result.is_file():
        return None
    text = part.result.read_text()
    if part.result.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return json.loads(text)


def _is_installed(wheel: str) -> bool:
    try:
        importlib.metadata.version(wheel.split("-", 1)[0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Check and time everything that needs a GPU, within a budget.")
    parser.add_argument("--budget-s", type=float, default=540)
    parser.add_argument("--wheels", type=Path, help="folder with wheels of packages that may be missing")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_check"))
    parser.add_argument("--only", choices=("tests", "timings"), help="one half")
    given = parser.parse_args()
    started = time.monotonic()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.wheels is not None:
        install(given.wheels)
    found = machine()
    print(json.dumps(found), flush=True)
    outcomes: list[Outcome] = []
    if given.only != "timings":
        share = 0.9 if given.only else 0.4
        outcomes += run_together(tests(out, given.budget_s * share), out)
        print(table(found, outcomes), flush=True)
    if given.only != "tests":
        for part in timings(out, given.budget_s - 10 - (time.monotonic() - started)):
            outcomes += run_together([part], out)
    report = {"machine": found, "parts": [asdict(outcome) | {"verdict": outcome.verdict} for outcome in outcomes]}
    (out / "gpu_check.json").write_text(json.dumps(report, indent=1))
    print(table(found, outcomes))
    sys.exit(any(outcome.code != 0 for outcome in outcomes))


if __name__ == "__main__":
    main()
