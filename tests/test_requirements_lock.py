"""requirements.lock has every package of the image, in a version that pyproject.toml allows, with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def test_every_requirement_is_locked_with_hashes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = re.sub("^#.*\n", "", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)
    locked = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        first, *hashes = (line.strip() for line in entry.split("\\\n"))
        name, version = first.split("==")
        assert hashes, f"{name} has no hash"
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name
        locked[canonicalize_name(name)] = version.split(";")[0].strip()
    required = map(Requirement, project["project"]["dependencies"] + project["build-system"]["requires"])
    for requirement in required:
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked as {version}"
