"""Memory is counted by the limits of control groups, of both versions and on any level, and by the machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.machine_memory import available_bytes, hidden_limit_bytes, memory_limit_bytes

GIB = 1 << 30
V1, V2 = "5:cpu:/c\n8:memory:{}\n0::/other\n", "0::{}\n"
NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000


def machine(root: Path, group: str, files: dict[str, object]) -> Path:
    """The files of a machine with 8 GiB of which 6 are available, on which this process is in a control group."""
    meminfo = {"MemTotal": 8 * GIB, "MemAvailable": 6 * GIB}
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("".join(f"{name}: {size // 1024} kB\n" for name, size in meminfo.items()))
    (root / "proc/self/cgroup").write_text(group)
    for name, value in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def group_v1(limit: int, usage: int, inactive: int) -> dict[str, object]:
    stat = f"inactive_file 7\ntotal_inactive_file {inactive}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}


def group_v2(limit: object, usage: int, inactive: int) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": usage, "memory.stat": f"inactive_file {inactive}\nanon 3"}


def below(folder: str, files: dict[str, object]) -> dict[str, object]:
    return {f"{folder}/{name}": value for name, value in files.items()}


MACHINES: dict[str, tuple[str, dict[str, object], int | None, int, bool]] = {
    "no limit": (V1.format("/a"), below("memory/a", group_v1(NO_LIMIT_V1, GIB, 0)), None, 6 * GIB, False),
    "no groups": ("", {}, None, 6 * GIB, False),
    "a container": (V1.format("/"), below("memory", group_v1(2 * GIB, GIB, GIB // 4)), 2 * GIB, 5 * GIB // 4, False),
    "a container with the host's path": (
        V1.format("/docker/abc"), below("memory", group_v1(2 * GIB, GIB, 0)), 2 * GIB, GIB, False,
    ),
    "a unit": (V2.format("/s/p.service"), below("s/p.service", group_v2(3 * GIB, GIB, 0)), 3 * GIB, 2 * GIB, True),
    "a limit above": (
        V2.format("/s/p"), below("s", group_v2(GIB, GIB, GIB // 8)) | below("s/p", group_v2("max", 5, 0)),
        GIB, GIB // 8, True,
    ),
    "a container of version 2": (V2.format("/"), group_v2(2 * GIB, GIB, 0), 2 * GIB, GIB, False),
    "more used than allowed": (V2.format("/"), group_v2(GIB, 2 * GIB, 0), GIB, 0, False),
    "above the machine's": (V2.format("/"), group_v2(9 * GIB, GIB, 0), None, 6 * GIB, False),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_the_lowest_limit_counts(tmp_path: Path, name: str) -> None:
    group, files, limit, available, is_hidden = MACHINES[name]
    root = machine(tmp_path, group, files)
    assert (memory_limit_bytes(root), available_bytes(root)) == (limit, available)
    assert hidden_limit_bytes(root) == (limit if is_hidden else None)


@pytest.fixture
def control_group() -> Iterator[Path]:
    """One below this process's, of the version that the machine has, with a limit of 1 GiB."""
    v1 = Path("/sys/fs/cgroup/memory")
    folder = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"polylora-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(GIB))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"this user makes no control groups ({error}); the files of such machines are imitated above")
    yield folder
    folder.rmdir()


def test_a_limit_of_this_machine_s_kernel(control_group: Path) -> None:
    code = "from app.machine_memory import *; print(memory_limit_bytes(), hidden_limit_bytes(), available_bytes())"
    enter = f'echo $$ > {control_group}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", enter, "sh", sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    limit, hidden, available = map(int, said.split())
    assert (limit, hidden) == (GIB, GIB)
    assert 0.8 * GIB < available < GIB, "a Python takes some of it"
