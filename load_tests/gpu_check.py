"""One command on a machine with a GPU: check everything that needs one, then time it, in calls of minutes.

Writes every log and result to a folder, and a short table at the end; each call has a budget of seconds. Progress is
saved in `gpu_check.json` after every stage: the same command continues where the last call stopped, until it reports
that all is done. Parts of a stage are separate processes, concurrent for tests, alone for timings; one that fails or
hangs is reported and stops nothing. Exit status 1 if anything has failed, 3 if stages are left. It needs Python 3.11 or
newer, torch with CUDA, triton, numba, transformers, peft and pytest, but no Ray and no network; the first command below
downloads wheels of other missing packages beforehand:

    python -m load_tests.gpu_check --fetch wheels
    python -m load_tests.gpu_check --wheels wheels --out results
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from load_tests.gpu_stages import Outcome, Stage, run_together, stages

#: Packages that such a machine tends to lack: without their dependencies, and with them.
WHEELS = (("--no-deps", "gguf==0.19.0"), ("pydantic>=2.12",))
_PLATFORM = ("--python-version", "3.12", "--only-binary", ":all:", "--platform", "manylinux2014_x86_64")
_VERSIONS = ("torch", "triton", "numpy", "numba", "transformers", "peft", "pydantic", "pytest")
#: Seconds reserved at the end of a call for the table and for processes that stop slowly.
_SPARE_S = 10


class Progress:
    """The finished stages, in a file of the results' folder that is written after every stage."""

    def __init__(self, out: Path) -> None:
        self._path = out / "gpu_check.json"
        self.done: dict[str, list[dict[str, Any]]] = {}
        self.machine: dict[str, Any] = {}
        if self._path.is_file():
            saved = json.loads(self._path.read_text())
            self.done, self.machine = saved["stages"], saved["machine"]

    def record(self, stage: Stage, outcomes: list[Outcome]) -> None:
        """Record a finished stage, whether it passed or failed."""
        self.done[stage.name] = [outcome.to_json() for outcome in outcomes]
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"machine": self.machine, "stages": self.done}, indent=1))
        new.replace(self._path)  # atomic: a call killed while it writes leaves the previous state

    @property
    def parts(self) -> list[dict[str, Any]]:
        return [part for parts in self.done.values() for part in parts]


def run(planned: list[Stage], out: Path, budget_s: float) -> Progress:
    """Run the unfinished stages in order, each only if its whole limit fits into the rest of the budget."""
    started = time.monotonic()
    progress = Progress(out)
    progress.machine = progress.machine or machine()
    for stage in planned:
        if stage.name in progress.done:
            continue
        if stage.limit_s > budget_s - _SPARE_S - (time.monotonic() - started):
            break
        print(f"{stage.name}: at most {stage.limit_s:.0f} s", flush=True)
        progress.record(stage, run_together(stage, out))
    return progress


def fetch(folder: Path) -> None:
    """Download the wheels, a few MB, from the package index."""
    for packages in WHEELS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *_PLATFORM, *packages]
        subprocess.run(command, check=True)


def install(wheels: Path) -> None:
    """Install missing packages from a folder, without a network."""
    files = [str(path) for path in sorted(wheels.glob("*.whl")) if not _is_installed(path.name)]
    if files:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *files]
        subprocess.run(command, check=True)


def machine() -> dict[str, Any]:
    """The versions of packages, and the GPU."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found["gpu"] = result.stdout.strip() or result.stderr.strip()[-200:]
    return found


def table(progress: Progress, left: list[str]) -> str:
    """One line per part, then what the parts measured, then what is left."""
    from load_tests.engine import bench_gpu  # after `install`

    lines = [
        ", ".join(f"{key} {value}" for key, value in progress.machine.items()),
        "",
        "| part | | s |",
        "|---|---|--:|",
    ]
    lines += [f"| {part['name']} | {part['verdict']} | {part['took_s']} |" for part in progress.parts]
    for part in progress.parts:
        lines += ["", f"{part['name']}:"]
        if part["code"] != 0:
            lines += part["last_lines"][-12:]
        if isinstance(part["result"], dict) and "shape" in part["result"]:
            lines.append(bench_gpu.table(part["result"]))  # what was measured before it was stopped, too
        elif part["code"] == 0:
            measured = [line for line in part["last_lines"] if line.startswith("|")]
            lines += measured or part["last_lines"][-1:]
    todo = f"{len(left)} stages are left: {', '.join(left)}; run the same command again" if left else "all stages done"
    return "\n".join([*lines, "", todo])


def _is_installed(wheel: str) -> bool:
    try:
        importlib.metadata.version(wheel.split("-", 1)[0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Check and time everything that needs a GPU, in calls of minutes.")
    parser.add_argument("--fetch", type=Path, metavar="DIR", help="only fetch the wheels into a folder")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of packages that may be missing")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_check"))
    parser.add_argument("--budget-s", type=float, default=540, help="seconds this call may take")
    parser.add_argument("--again", action="store_true", help="start over")
    parser.add_argument("--small", action="store_true", help="without a GPU: every part once, tiny, nothing is timed")
    given = parser.parse_args()
    if given.fetch is not None:
        fetch(given.fetch)
        return
    out = given.out.resolve()
    if given.again:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    if given.wheels is not None:
        install(given.wheels)
    planned = stages(out, small=given.small)
    progress = run(planned, out, given.budget_s)
    left = [stage.name for stage in planned if stage.name not in progress.done]
    print(table(progress, left))
    failed = any(part["code"] != 0 for part in progress.parts)
    sys.exit(1 if failed else 3 if left else 0)


if __name__ == "__main__":
    main()
