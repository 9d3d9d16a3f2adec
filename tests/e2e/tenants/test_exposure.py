"""What other machines and other users reach of a service that listens on all addresses: HTTP, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISLNK
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from load_tests.process_tree import session_processes
from tests.e2e.tenants.conftest import KEY, Keyed, paths_below

#: 127.0.0.1 and ::ffff:127.0.0.1 as the kernel writes them.
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
LISTENING = "0A"


class Listener(NamedTuple):
    pid: int
    address: str
    port: int


def test_no_port_but_haproxy_s_is_reached_from_elsewhere(keyed: Keyed) -> None:
    found = list(listeners(keyed.process.process.pid))
    http_port = urlsplit(keyed.url).port
    assert {each.port for each in found if each.address not in LOOPBACK} == {http_port}
    commands = set()
    for each in found:
        if each.port == http_port:
            with suppress(FileNotFoundError, ProcessLookupError):  # a reload replaces HAProxy
                commands.add(Path(f"/proc/{each.pid}/cmdline").read_text().replace("\0", " "))
    commands.discard("")
    assert commands
    assert all("haproxy -db" in command for command in commands), "HAProxy and its supervisor"
    assert len({each.port for each in found}) > 10, "Ray's ports were looked at"


def test_other_users_read_and_write_nothing(keyed: Keyed) -> None:
    state = Path(keyed.process.environment["POLYLORA_STATE_DIR"])
    for folder in (state, Path(keyed.process.environment["RAY_TMPDIR"])):
        assert folder.stat().st_mode & 0o777 == 0o700
    modes = {}
    for path in paths_below(state):
        with suppress(FileNotFoundError):
            modes[path] = path.lstat().st_mode
    assert any(path.name == "polylora.log" for path in modes)
    assert [path for path, mode in modes.items() if mode & 0o077 and not S_ISLNK(mode)] == []


def test_a_service_for_a_network_answers_to_its_own_name(keyed: Keyed) -> None:
    """The ingress is reached at 127.0.0.1 by HAProxy, and yet is not for this machine only."""
    for host in ("polylora.example", "10.1.2.3:8000"):
        headers = {"Host": host, "Authorization": f"Bearer {KEY}"}
        answer = httpx.get(f"{keyed.url}/v1/organization/projects", headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text


def listeners(first: int) -> Iterator[Listener]:
    """The listening TCP sockets of all processes of a service."""
    places: dict[str, tuple[str, int]] = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            address, port = local.split(":")
            if state == LISTENING:
                places[rest[5]] = (address, int(port, 16))
    for pid in session_processes(first):
        with suppress(FileNotFoundError, ProcessLookupError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    inode = os.readlink(entry).removeprefix("socket:[").removesuffix("]")
                    if inode in places:
                        yield Listener(pid, *places[inode])
