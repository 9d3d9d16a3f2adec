"""The wire between machines: what it loses, how late it is, and that a cut direction leaves the other one open."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.network.machines import Link, Network, skip_without_networks

#: As many fit into the sender's queue.
NUM_PACKETS = 400
PORT = 9000
_SO_RCVBUFFORCE = 33  # linux/socket.h


@pytest.fixture
def network() -> Iterator[Network]:
    skip_without_networks()
    with Network(2) as started:
        yield started


def udp(network: Network, number: int) -> tuple[socket.socket, tuple[str, int]]:
    """A socket on a machine, and its address."""
    with network.enter(number) as address:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind((address, PORT))
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 20)  # for all of them at once
    opened.settimeout(60)
    return opened, (address, PORT)


def received(receiver: socket.socket) -> Iterator[bytes]:
    """What comes until nothing has come for ten seconds, which a busy machine may need to pass packets on."""
    receiver.settimeout(10)
    while True:
        try:
            yield receiver.recv(100)
        except TimeoutError:
            return


def test_a_part_of_the_packets_is_lost_and_only_in_one_direction(network: Network) -> None:
    network.links = {(0, 1): Link(loss=0.25)}
    (one, at_one), (other, at_other) = udp(network, 0), udp(network, 1)
    with one, other:
        for sender, receiver, address, expected in ((one, other, at_other, 0.75), (other, one, at_one, 1.0)):
            for number in range(NUM_PACKETS):
                sender.sendto(b"%d" % number, address)
            numbers = [int(packet) for packet in received(receiver)]
            assert numbers == sorted(set(numbers)), "in order, each once"
            assert len(numbers) / NUM_PACKETS == pytest.approx(expected, abs=0.07 if expected < 1 else 0)


def test_packets_are_late_by_the_delay_of_their_direction(network: Network) -> None:
    network.links = {(0, 1): Link(delay_s=0.5), (1, 0): Link(delay_s=0.1)}
    (one, at_one), (other, at_other) = udp(network, 0), udp(network, 1)
    with one, other:
        for sender, receiver, address, delay_s in ((one, other, at_other, 0.5), (other, one, at_one, 0.1)):
            delays_s = []
            for _ in range(5):
                began_s = time.monotonic()
                sender.sendto(b"packet", address)
                assert receiver.recv(100) == b"packet"
                delays_s.append(time.monotonic() - began_s)
            assert delay_s <= min(delays_s) < delay_s + 0.4


def test_a_cut_direction_leaves_the_other_one_open_and_is_mended(network: Network) -> None:
    (one, at_one), (other, at_other) = udp(network, 0), udp(network, 1)
    with one, other:
        network.links = {(0, 1): Link(loss=1.0)}
        one.sendto(b"lost", at_other)
        other.sendto(b"open", at_one)
        assert one.recv(100) == b"open"
        network.links = {}
        one.sendto(b"mended", at_other)
        assert [*received(other)] == [b"mended"]


def test_machines_have_ports_of_their_own(network: Network) -> None:
    with network.enter(0) as address, socket.create_server((address, PORT)), network.enter(1):
        with socket.create_connection((address, PORT), timeout=5):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", PORT), timeout=5)
