"""Machines of one machine: each has a network namespace of its own, and a thread carries packets between them.

A packet leaves its machine through a TUN device, so this process decides what is lost, late or cut off in one
direction; the kernel needs neither netem nor netfilter. Needs root and /dev/net/tun. A namespace ends with its file
descriptor and its last process.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import selectors
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import pytest

_CLONE_NEWNET = 0x40000000
#: linux/if_tun.h: the request, and a device for IP packets without a header of its own.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_NAMESPACE = "/proc/thread-self/ns/net"
_DEVICE = "wire"
_SUBNET = bytes((10, 78, 0))
#: How soon a change of the wire's end is seen.
_POLL_S = 0.1


def skip_without_networks() -> None:
    """Skip the test where this process may make no networks."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        pytest.skip("networks need root, iproute2 and /dev/net/tun")


class Link(NamedTuple):
    """What happens to packets of one direction. `loss`: the part of them that is dropped; 1 cuts the direction."""

    loss: float = 0.0
    delay_s: float = 0.0


class Network:
    """So many machines, while it is entered; `links` are by sender and receiver, and may be changed at any time."""

    def __init__(self, num_machines: int) -> None:
        self.links: dict[tuple[int, int], Link] = {}
        self._addresses = [f"{'.'.join(map(str, _SUBNET))}.{number + 1}" for number in range(num_machines)]
        with ThreadPoolExecutor(1) as outside:
            self._namespaces, self._devices = zip(*outside.map(_machine, self._addresses), strict=True)
        self._random = random.Random(0)
        self._is_over = False
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        for file in (*self._namespaces, *self._devices):
            os.close(file)

    @contextmanager
    def enter(self, number: int) -> Iterator[str]:
        """Move this thread to a machine: sockets and processes that it opens are there. Yields its address."""
        before = os.open(_NAMESPACE, os.O_RDONLY)
        try:
            _set_namespace(self._namespaces[number])
            yield self._addresses[number]
        finally:
            _set_namespace(before)
            os.close(before)

    def _carry(self) -> None:
        """Read every machine's packets and write those that are due."""
        order, waiting = itertools.count(), list[tuple[float, int, int, bytes]]()
        with selectors.DefaultSelector() as selector:
            for number, device in enumerate(self._devices):
                selector.register(device, selectors.EVENT_READ, number)
            while not self._is_over:
                wait_s = waiting[0][0] - time.monotonic() if waiting else _POLL_S
                for key, _ in selector.select(min(max(wait_s, 0.0), _POLL_S)):
                    packet = os.read(key.fd, 1 << 16)
                    if (receiver := self._receiver(packet)) is not None:
                        link = self.links.get((key.data, receiver), Link())
                        if self._random.random() >= link.loss:
                            heapq.heappush(waiting, (time.monotonic() + link.delay_s, next(order), receiver, packet))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, _, receiver, packet = heapq.heappop(waiting)
                    with suppress(OSError):  # a full queue drops packets, as anywhere
                        os.write(self._devices[receiver], packet)

    def _receiver(self, packet: bytes) -> int | None:
        """The machine to which an IPv4 packet goes, if it is one of these."""
        is_ours = packet[0] >> 4 == 4 and packet[16:19] == _SUBNET and 0 < packet[19] <= len(self._devices)
        return packet[19] - 1 if is_ours else None


def _machine(address: str) -> tuple[int, int]:
    """File descriptors of a new namespace and of its TUN device. The calling thread is in the namespace afterwards."""
    if _libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        "link set lo up",
        f"addr add {address}/24 dev {_DEVICE}",
        f"link set {_DEVICE} up",
        f"route add default dev {_DEVICE}",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return os.open(_NAMESPACE, os.O_RDONLY), device


def _set_namespace(file: int) -> None:
    if _libc.setns(file, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


_libc = ctypes.CDLL(None, use_errno=True)
