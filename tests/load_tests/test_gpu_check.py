"""The one command for a GPU, without one: what fails stops nothing, what is done stays done, all of it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from load_tests import gpu_check
from load_tests.gpu_check import Progress
from load_tests.gpu_stages import ROOT, Part, Stage, run_together, stages

#: What a call may take on the machine this is for, and all calls together.
CALL_S, ALL_S = 540, 1600


def part(name: str, code: str, result: Path | None = None) -> Part:
    return Part(name, [sys.executable, "-c", code], result)


def test_a_part_that_fails_or_hangs_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    result, half = tmp_path / "result.json", tmp_path / "half.json"
    parts = [
        part("good one", f"open({str(result)!r}, 'w').write('[1]'); print('| a | b |'); print('done')", result),
        part("bad one", f"open({str(half)!r}, 'w').write('[1'); raise SystemExit('broken')", half),
    ]
    progress = Progress(tmp_path)
    progress.record(Stage("pair", 600, parts), run_together(Stage("pair", 600, parts), tmp_path))
    slow = Stage("slow", 1, [part("slow one", "import time; time.sleep(3600)")])
    progress.record(slow, run_together(slow, tmp_path))
    verdicts = {found["name"]: (found["verdict"], found["result"]) for found in progress.parts}
    assert verdicts == {
        "good one": ("ok", [1]),
        "bad one": ("failed (1)", None),
        "slow one": ("stopped at its limit", None),
    }
    text = gpu_check.table(progress, ["fuzz"])
    assert "| bad one | failed (1)" in text
    assert "| a | b |" in text
    assert "broken" in text
    assert "1 stages are left: fuzz; run the same command again" in text


def test_a_call_goes_on_where_the_last_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "machine", lambda: {"gpu": "none"})
    ran: list[str] = []

    def run_stage(stage: Stage, out: Path) -> list[gpu_check.Outcome]:
        assert out == tmp_path
        ran.append(stage.name)
        if stage.name == "c" and ran.count("c") == 1:
            raise KeyboardInterrupt  # the call is ended from outside
        return [gpu_check.Outcome(stage.name, 0, 1.0, [])]

    monkeypatch.setattr(gpu_check, "run_together", run_stage)
    planned = [Stage(name, limit_s, []) for name, limit_s in (("a", 100), ("b", 300), ("c", 100))]
    assert list(gpu_check.run(planned, tmp_path, 200).done) == ["a"]  # "b" does not fit what is left
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run(planned, tmp_path, 540)
    assert list(Progress(tmp_path).done) == ["a", "b"]
    assert list(gpu_check.run(planned, tmp_path, 540).done) == ["a", "b", "c"]
    gpu_check.run(planned, tmp_path, 540)
    assert ran == ["a", "b", "c", "c"]


def test_every_stage_fits_a_call_and_names_files_that_are_there(tmp_path: Path) -> None:
    planned = stages(tmp_path)
    assert len({stage.name for stage in planned}) == len(planned)
    assert all(stage.limit_s + 10 <= CALL_S for stage in planned)
    assert sum(stage.limit_s for stage in planned) <= ALL_S
    for command in (part.command for stage in planned for part in stage.parts):
        named = [ROOT / word for word in command if word.startswith("tests/")]
        modules = [ROOT / f"{word.replace('.', '/')}.py" for word in command if word.startswith("load_tests.")]
        assert named or modules
        assert all(path.exists() for path in named + modules)
    tests = {path.name for path in (ROOT / "tests/engine/cuda").glob("test_*.py")}
    words = {word.rpartition("/")[2] for stage in planned for part in stage.parts for word in part.command}
    assert tests <= words


def test_all_of_it_starts_without_a_gpu_and_without_ray(tmp_path: Path) -> None:
    """Ray and the service's own packages cannot be imported: the machine it is for lacks them."""
    absent = tmp_path / "absent"
    for name in ("ray", "fastapi", "sqlalchemy", "cryptography", "psycopg", "openai", "pytest_asyncio"):
        (absent / name).mkdir(parents=True)
        (absent / name / "__init__.py").write_text(f"raise ImportError({name!r})")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(absent)])}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    out = tmp_path / "out"
    command = [sys.executable, "-m", "load_tests.gpu_check", "--small", "--out", str(out), "--budget-s", "100000"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads((out / "gpu_check.json").read_text())
    assert list(found["stages"]) == ["tests", "kernels"]
    assert "all stages done" in done.stdout
    assert "not measured" not in done.stdout
    assert done.stdout.count(" passed") == 2
    assert "nothing was timed" in done.stdout
