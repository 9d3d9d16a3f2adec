"""The service's code as another release might have it: the messages between its processes have other fields.

Ray has workers import from where its driver does before it looks at PYTHONPATH; so `app` is found by a finder of our
own, which Python installs when it starts (`sitecustomize`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from load_tests.service import ROOT

#: Folders without messages: their compiled functions are found where this release has left them.
SAME = ("kernels", "engine/cpu")
#: File -> a field of a message there, and a new one that follows it in the other release.
NEW_FIELDS = {
    "engine/request.py": [
        ('    cache_salt: bytes = b""\n', "    a_new_setting: float = 7.5\n"),
        ("    error: Exception | None = field(default=None, compare=False)\n", "    energy_j: float = 0.5\n"),
    ],
    "engine/adapters/card.py": [('    uri: str = ""\n', '    license: str = "unknown"\n')],
    "deployments/registry/entries.py": [("    extra_bytes: int = 0\n", '    colour: str = "blue"\n')],
}
#: What its replicas add to their counts, so that a test sees which release it talks to.
SIGN = {
    "deployments/replica/service.py": [
        ('            "num_aborted": stats.num_aborted,\n', '            "release": "the other",\n'),
    ],
}
FINDER = """
import sys
from importlib.machinery import PathFinder

class OtherRelease:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{folder!r}]) if name == "app" else None

sys.meta_path.insert(0, OtherRelease)
"""


def other_release(folder: Path) -> Path:
    """A folder for PYTHONPATH: processes that have it import `app` from there."""
    code = folder / "app"
    hidden = shutil.ignore_patterns("__pycache__", *(name.rpartition("/")[2] for name in SAME))
    shutil.copytree(ROOT / "app", code, ignore=hidden)
    for name in SAME:
        (code / name).symlink_to(ROOT / "app" / name, target_is_directory=True)
    for name, changes in (NEW_FIELDS | SIGN).items():
        path = code / name
        text = path.read_text()
        for line, new in changes:
            assert line in text, f"{name} has no line {line!r} any more: choose another"
            text = text.replace(line, line + new)
        path.write_text(text)
    (folder / "sitecustomize.py").write_text(FINDER.format(folder=str(folder)))
    return folder
