"""Containers of the image: a copy of its files, namespaces, a user, an environment, and no more.

All of them are children of the test. A container's mounts, processes and network end with its first process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.e2e.image.build import MOUNTS, UNSHARE, Image

#: $1 is the image, $2 an empty folder of this container, the rest pairs of a folder of this machine and where it is
#: seen, then "--" and the command. It says that all is made, and waits for a line: until then links can be added.
_START = f"""
image=$1; scratch=$2; shift 2
mount -t tmpfs tmpfs "$scratch" && mkdir "$scratch/changes" "$scratch/work" "$scratch/root"
mount -t overlay overlay -o "lowerdir=$image,upperdir=$scratch/changes,workdir=$scratch/work" "$scratch/root"
root="$scratch/root"
set -- "$root" "$@"
{MOUNTS}
shift
mount -t tmpfs -o size=4g,mode=1777 tmpfs "$root/dev/shm"
while [ "$1" != "--" ]; do
    if [ -d "$1" ]; then mkdir -p "$root/$2"; else mkdir -p "$(dirname "$root/$2")"; touch "$root/$2"; fi
    mount --bind "$1" "$root/$2"
    shift 2
done
shift
ip link set lo up
echo made
read -r _
exec chroot "$root" "$@"
"""
_REQUEST = """
import json, sys, urllib.error, urllib.request
url, method, headers, body, timeout_s = json.load(sys.stdin)
request = urllib.request.Request(url, body and json.dumps(body).encode(), headers, method=method)
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    with direct.open(request, timeout=timeout_s) as answer:
        print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


class Answer(NamedTuple):
    """status 0: no connection, or none in time."""

    status: int
    text: str


class Container:
    """`docker run`: the image's command or another one, as the image's user."""

    def __init__(
        self,
        image: Image,
        folder: Path,
        environment: Mapping[str, str],
        command: Sequence[str] = (),
        mounts: Mapping[str, Path] | None = None,
        *,
        is_restricted: bool = False,
    ) -> None:
        """`folder`: an empty one for this container. `mounts`: a folder or file of this machine by where it is seen.

        is_restricted: without capabilities, and without a way to more rights (`securityContext`).
        """
        uid, gid, home = image.account()
        self._prefix = [
            # A change of the user takes from a process that it ends with its parent.
            "setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--pdeathsig=KILL",
            *(["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"] if is_restricted else []),
            "env", "--ignore-environment", f"--chdir={image.folder}", f"HOME={home}",
            *(f"{name}={value}" for name, value in (image.environment | dict(environment)).items()),
        ]  # fmt: skip
        (folder / "scratch").mkdir(parents=True)
        pairs = [str(part) for target, source in (mounts or {}).items() for part in (source, target)]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*UNSHARE, "--net", "sh", "-euc", _START, "sh", image.root, folder / "scratch",
                 *pairs, "--", *self._prefix, *(command or image.command)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            self.wait(lambda: self.tail() == "made\n", "namespaces", 60)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Let its command begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def run(self, *command: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """`docker exec`, with the environment of its first process."""
        return subprocess.run(
            ["nsenter", f"--target={self.first}", "--mount", "--pid", "--net", "--root", *self._prefix, *command],
            check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    def request(
        self, url: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None,
        timeout_s: float = 300.0,
    ) -> Answer:  # fmt: skip
        """An HTTP request from its network; JSON if it has a body."""
        all_headers = {"Content-Type": "application/json"} | dict(headers or {})
        done = subprocess.run(
            [*self.network, sys.executable, "-c", _REQUEST],
            input=json.dumps([url, method, all_headers, body, timeout_s]),
            stdout=subprocess.PIPE, text=True, check=True, timeout=timeout_s + 60,
        )  # fmt: skip
        return Answer(*json.loads(done.stdout))

    @property
    def network(self) -> list[str]:
        """What makes the rest of a command line, a program of this machine, run in its network."""
        return ["nsenter", f"--target={self.process.pid}", "--net"]

    @property
    def first(self) -> int:
        """The process that is 1 inside."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def wait(self, is_done: Any, what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.tail()}"
            assert time.monotonic() < deadline_s, f"no {what} in {timeout_s:g} s:\n{self.tail()}"
            time.sleep(1)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def stop(self, timeout_s: float) -> int:
        """`docker stop`: the exit status, -9 if it had not ended in time."""
        if self.process.poll() is None:
            os.kill(self.first, signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it, and so remove its mounts and its network."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(ProcessLookupError, ValueError, FileNotFoundError):  # it may have ended
            os.kill(self.first, signal.SIGKILL)
        self.process.kill()
        return self.process.wait(60)


def project_key(container: Container, admin_key: str) -> str:
    """A new project's key, made by the service's own command."""
    made = container.run("env", f"POLYLORA_ADMIN_KEY={admin_key}", "polylora", "tenants", "create", "acme")
    assert made.returncode == 0, made
    (key,) = re.findall(r"sk-poly-[\w-]+", made.stdout)
    return str(key)
