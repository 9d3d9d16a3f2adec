"""What a confined process can do, tried from inside one, also where the kernel lacks parts of the confinement."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.engine.adapters.sandbox.confinement import confinement_gaps

#: Each attempt with how it may be denied. The child's working folder has `input`, `other` and `other/victim`.
ATTEMPTS = {
    "read the input": "open('input/file').read()",
    "list the input": "os.listdir('input')",
    "stat the input": "os.fstat(os.open('input/file', os.O_RDONLY))",
    "start a thread": "_thread.start_new_thread(time.sleep, (0,))",
    "write to an open descriptor": "os.write(1, b'')",
    "read /etc/passwd": "open('/etc/passwd').read()",
    "list a folder": "os.listdir('other')",
    "open a socket": "socket.socket()",
    "open a Unix socket": "socket.socket(socket.AF_UNIX)",
    "write into the input": "open('input/file', 'a')",
    "create a file": "open('input/new', 'w')",
    "unlink": "os.unlink('other/victim')",
    "unlink the input": "os.unlink('input/file')",
    "rename": "os.rename('other/victim', 'other/renamed')",
    "make a folder": "os.mkdir('other/folder')",
    "change permissions": "os.chmod('other/victim', 0o777)",
    "truncate": "os.truncate('other/victim', 0)",
    "import a module": "importlib.import_module('this')",
    "exec": "os.execv('/bin/true', ['true'])",
    "fork": "os.fork() or os._exit(0)",
    "signal another process": "os.kill(os.getppid(), 0)",
    "limit another process": "resource.prlimit(os.getppid(), resource.RLIMIT_CORE)",
    "trace another process": "_raise_on_error(_LIBC.ptrace(16, 0x7FFFFFFF, 0, 0))",
    "change the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
}
HARMLESS = set(list(ATTEMPTS)[:5])
#: What is possible in spite of seccomp where there is no Landlock: reading.
WITHOUT_LANDLOCK = {"read /etc/passwd", "list a folder"}
#: What Landlock alone denies; signals since its version 6.
BY_LANDLOCK = {
    "read /etc/passwd", "list a folder", "write into the input", "create a file", "unlink", "unlink the input",
    "rename", "make a folder", "exec",
}  # fmt: skip

CHILD = """
import _thread, errno, fcntl, importlib, json, os, resource, socket, sys, time
from pathlib import Path
from app.engine.adapters.sandbox import confinement
from app.engine.adapters.sandbox.confinement import _LIBC, _raise_on_error
missing, readable, attempts = json.loads(sys.argv[1])
for name in missing:
    setattr(confinement, name, lambda: 0)
gaps = confinement.confinement_gaps()
confinement.confine_process([Path(path) for path in readable])
found = {}
for name, attempt in attempts.items():
    try:
        eval(attempt)
        found[name] = 0
    except OSError as error:
        found[name] = error.errno
    except ModuleNotFoundError:
        found[name] = errno.ENOENT
print(json.dumps([gaps, found]), flush=True)
os._exit(0)
"""


def possible(
    folder: Path, missing: tuple[str, ...] = (), readable: tuple[str, ...] = ("input", "absent")
) -> tuple[list[str], set[str]]:
    """The gaps that a child finds, and the attempts that succeed in it."""
    (folder / "input").mkdir()
    (folder / "other").mkdir()
    (folder / "input/file").write_text("input")
    (folder / "other/victim").write_text("whole")
    attempts = dict(ATTEMPTS)
    if missing == EVERYTHING:
        del attempts["exec"]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([missing, readable, attempts])],
        cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    gaps, found = json.loads(child.stdout)
    assert set(found.values()) <= {0, errno.EPERM, errno.EACCES, errno.ENOTTY, errno.ESRCH, errno.ENOENT}
    return gaps, {name for name, code in found.items() if not code}


EVERYTHING = ("_landlock_version", "_can_filter")
GAPS = confinement_gaps()
NEEDS_LANDLOCK = pytest.mark.skipif(any("Landlock" in gap for gap in GAPS), reason="this kernel offers no Landlock")
NEEDS_SECCOMP = pytest.mark.skipif(
    any("seccomp" in gap for gap in GAPS), reason="this kernel offers no seccomp filters"
)


@NEEDS_LANDLOCK
@NEEDS_SECCOMP
def test_a_confined_process_reads_its_input_and_nothing_else(tmp_path: Path) -> None:
    gaps, succeeded = possible(tmp_path)
    assert gaps == []
    assert succeeded == HARMLESS
    assert (tmp_path / "other/victim").read_text() == "whole"


@NEEDS_LANDLOCK
@NEEDS_SECCOMP
def test_a_process_without_input_opens_nothing(tmp_path: Path) -> None:
    _, succeeded = possible(tmp_path, readable=())
    assert succeeded == {"start a thread", "write to an open descriptor"}


@NEEDS_SECCOMP
def test_without_landlock_a_process_can_read_and_says_so(tmp_path: Path) -> None:
    (gap,), succeeded = possible(tmp_path, ("_landlock_version",))
    assert gap.startswith("can read every file of this service's user: the kernel offers no Landlock")
    assert succeeded == HARMLESS | WITHOUT_LANDLOCK
    assert (tmp_path / "other/victim").read_text() == "whole"


@NEEDS_SECCOMP
def test_without_landlock_a_process_that_has_no_input_opens_nothing_either(tmp_path: Path) -> None:
    _, succeeded = possible(tmp_path, ("_landlock_version",), readable=())
    assert succeeded == {"start a thread", "write to an open descriptor"}


@NEEDS_LANDLOCK
def test_without_seccomp_a_process_has_a_network_and_says_so(tmp_path: Path) -> None:
    (gap,), succeeded = possible(tmp_path, ("_can_filter",))
    assert gap.startswith("can open connections and start programs: the kernel offers no seccomp filters")
    assert succeeded >= HARMLESS | {"open a socket"}
    assert not succeeded & BY_LANDLOCK


def test_without_either_everything_goes_on_and_both_are_said(tmp_path: Path) -> None:
    gaps, succeeded = possible(tmp_path, EVERYTHING)
    assert len(gaps) == 2
    assert succeeded >= HARMLESS | WITHOUT_LANDLOCK | {"open a socket", "unlink", "fork"}
