"""The Dockerfile's image without Docker: a Debian base by mmdebstrap, then each of the file's own steps in a chroot.

No step's text is repeated here: what `docker build` would run is run. Everything happens in mount and process
namespaces, so nothing of it is mounted or runs when they end.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from load_tests.service import ROOT

#: What Docker itself sets.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Where steps find this machine's files: what its pip settings name.
MACHINE = "/mnt"
BUILD_TIMEOUT_S = 1800.0
#: Steps get namespaces of their own, which end with this process at the latest, and with them what runs there.
UNSHARE = (
    *("setpriv", "--pdeathsig=KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"),
)
#: Docker's mounts, for the root folder $1.
MOUNTS = 'mount -t proc proc "$1/proc" && mount --rbind /sys "$1/sys" && mount --rbind /dev "$1/dev"'


@dataclass
class Image:
    """The root folder, and what a container gets unless it says otherwise."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    user: str = "root"
    folder: str = "/"
    volumes: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health_command: list[str] = field(default_factory=list)

    def account(self) -> tuple[int, int, str]:
        """User id, group id and home directory of its user."""
        for line in (self.root / "etc/passwd").read_text().splitlines():
            name, _, uid, gid, _, home, _ = line.split(":")
            if self.user in (name, uid):
                return int(uid), int(gid), home
        raise AssertionError(f"the image has no user {self.user}")


def instructions(text: str) -> list[tuple[str, str]]:
    """The steps of a Dockerfile: (instruction, what follows it)."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    found = [line.partition(" ") for line in lines.splitlines() if line.strip()]
    return [(name.upper(), rest.strip()) for name, _, rest in found]


def build(folder: Path, arguments: Mapping[str, str]) -> Image:
    """`docker build --build-arg ... .` into an empty folder; `arguments` are the values for ARG."""
    image = Image(folder)
    values: dict[str, str] = {}
    for name, rest in instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        text = string.Template(rest).safe_substitute(values | image.environment)
        match name:
            case "ARG":
                variable, _, default = rest.partition("=")
                values[variable] = arguments.get(variable, default)
            case "FROM":
                _make_base(text, folder)
                values = {}  # an ARG before FROM does not reach the steps
            case "RUN":
                _run_step(image, rest, values)
            case "COPY":
                *sources, target = text.split()
                _copy(sources, folder / image.folder.lstrip("/") / target, is_folder=target.endswith("/"))
            case "WORKDIR":
                image.folder = text
                (folder / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENV":
                image.environment |= dict(word.split("=", 1) for word in shlex.split(text))
            case "USER":
                image.user = text
            case "VOLUME":
                image.volumes += json.loads(rest)
            case "HEALTHCHECK":
                image.health_command = json.loads(rest.partition("CMD ")[2])
            case "CMD":
                image.command = json.loads(rest)
            case "EXPOSE" | "STOPSIGNAL":
                pass
            case _:
                raise AssertionError(f"a step that this test does not know: {name} {rest}")
    return image


def _make_base(name: str, folder: Path) -> None:
    match = re.fullmatch(r"debian:(\w+)-slim", name)
    assert match, f"mmdebstrap makes debian:...-slim only, not {name}"
    subprocess.run(
        ["mmdebstrap", "--variant=minbase", match[1], folder],
        check=True,
        timeout=BUILD_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


def _run_step(image: Image, command: str, values: Mapping[str, str]) -> None:
    script = f'{MOUNTS} && mount --rbind / "$1{MACHINE}" && cp /etc/resolv.conf "$1/etc/" && exec chroot "$@"'
    environment = image.environment | values | _pip_settings()
    variables = [f"{name}={value}" for name, value in environment.items()]
    inside = ["env", "--ignore-environment", f"--chdir={image.folder}", *variables, "sh", "-ec", command]
    subprocess.run(
        [*UNSHARE, "sh", "-ec", script, "sh", image.root, *inside],
        check=True,
        timeout=BUILD_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


def _copy(sources: list[str], target: Path, *, is_folder: bool) -> None:
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, target / Path(source).name if is_folder else target)


def _pip_settings() -> dict[str, str]:
    """This machine's settings of pip and of proxies as environment variables, files named as a step sees them."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    settings = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        variable = "PIP_" + name.rpartition(".")[2].upper().replace("-", "_")
        settings[variable] = re.sub(r"(^|\s|file://)/", rf"\g<1>{MACHINE}/", ast.literal_eval(value))
    return settings
