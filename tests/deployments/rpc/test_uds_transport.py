"""Frames through a connection beside the call: the same frames, and the same end, as through the call itself."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest

from app.deployments.replica.engine_service import EngineService
from app.deployments.rpc import frames as frames_module
from app.deployments.rpc import uds_transport as frame_sockets
from app.deployments.rpc.frames import FrameHub, unpack_frame
from app.deployments.rpc.transport import EngineFailed, Frame, ReplicaUnreachable
from app.deployments.rpc.uds_transport import FOLDER_VARIABLE, Connection, FrameSocket, connect, frames_from_socket
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.request import GenerateRequest, SamplingParams, TokenChunk
from tests import seeds
from tests.deployments.rpc.test_frames import random_chunk

LINK = "link-1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sockets"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


@asynccontextmanager
async def opened(replica_id: str = "replica") -> AsyncIterator[FrameSocket]:
    frame_socket = FrameSocket(replica_id)
    await frame_socket.open()
    try:
        yield frame_socket
    finally:
        frame_socket.close()


async def frames_of(call: AsyncIterator[bytes], link_id: str = LINK) -> AsyncGenerator[Frame]:
    """What a transport yields."""
    async with aclosing(frames_from_socket(call, link_id, await connected())) as items:
        async for item in items:
            yield unpack_frame(item)


async def connected(replica_id: str = "replica") -> Connection:
    connection = await connect(replica_id)
    assert connection is not None
    return connection


async def hang_up(connection: Connection) -> None:
    """Without a word; returns when the other side has closed its end, too."""
    reader, writer = connection
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


def unheard() -> None:
    raise AssertionError("the ingress has not left")


def without_errors(frame: Frame) -> list[TokenChunk]:
    """Errors of one kind and message are not equal; `test_frames` compares them."""
    return [chunk._replace(error=None) for chunk in frame]


async def test_frames_arrive_as_they_were_sent() -> None:
    rng = seeds.rng()
    sent: list[Frame] = [[]]
    sent += [[random_chunk(rng) for _ in range(rng.integers(1, 40))] for _ in range(300)]
    sent.append([TokenChunk("long/1", tuple(range(200_000))), TokenChunk("last/1", (1,))])

    async def frames() -> AsyncGenerator[Frame]:
        for number, frame in enumerate(sent):
            yield frame
            if number % 50 == 0:
                await asyncio.sleep(0.01)

    async with opened() as frame_socket:
        received = [frame async for frame in frames_of(frame_socket.carry(LINK, frames(), unheard))]
        assert [without_errors(frame) for frame in received] == [without_errors(frame) for frame in sent]
        assert frame_socket.num_connections == 0


async def test_links_do_not_mix() -> None:
    async def frames(link_id: str) -> AsyncGenerator[Frame]:
        yield []
        for number in range(200):
            yield [TokenChunk(link_id, (number,))]
            await asyncio.sleep(0)

    async def read(link_id: str, frame_socket: FrameSocket) -> list[Frame]:
        return [frame async for frame in frames_of(frame_socket.carry(link_id, frames(link_id), unheard), link_id)]

    async with opened() as frame_socket:
        link_ids = [f"link-{number}" for number in range(8)]
        received = await asyncio.gather(*(read(link_id, frame_socket) for link_id in link_ids))
    for link_id, frames_read in zip(link_ids, received, strict=True):
        assert frames_read == [[], *([TokenChunk(link_id, (number,))] for number in range(200))]


async def test_an_end_comes_behind_the_last_frame_and_says_why() -> None:
    async def frames() -> AsyncGenerator[Frame]:
        yield []
        yield [TokenChunk("a/1", (5,))]
        raise EngineFailed("it broke", suspects=("a/1",))

    async with opened() as frame_socket:
        reader = frames_of(frame_socket.carry(LINK, frames(), unheard))
        assert [await anext(reader), await anext(reader)] == [[], [TokenChunk("a/1", (5,))]]
        with pytest.raises(EngineFailed, match="it broke") as caught:
            await anext(reader)
        assert caught.value.suspects == {"a/1"}


async def test_a_reader_that_is_behind_gets_frames_merged() -> None:
    hub, num_chunks = FrameHub(), 4000
    async with opened() as frame_socket:
        call = frame_socket.carry(LINK, hub.frames(LINK, lambda: 0.5), lambda: hub.close_link(LINK))
        reader = frames_of(call)
        assert await anext(reader) == []
        hub.register(LINK, "a/1")
        for number in range(num_chunks):  # about 2 MB
            hub.deliver([TokenChunk("a/1", tuple(range(number, number + 100)))])
            await asyncio.sleep(0)
        hub.deliver([TokenChunk("a/1", finish_reason="stop")])
        frames = [frame async for frame in reader]
    chunks = [chunk for frame in frames for chunk in frame]
    assert [chunk.token_ids[0] for chunk in chunks[:-1]] == list(range(num_chunks))
    assert chunks[-1].finish_reason == "stop"
    assert len(frames) < num_chunks


class _Engine:
    """Takes everything, computes nothing."""

    failure = None

    def __init__(self) -> None:
        self.running: set[str] = set()

    def submit(self, request: GenerateRequest, _adapter: LoraAdapter | None = None) -> None:
        self.running.add(request.request_id)

    def abort(self, request_id: str) -> None:
        self.running.discard(request_id)


class _NoAdapters:
    async def fetch(self, _: AdapterRef) -> LoraAdapter:
        raise AssertionError("no request names one")


async def test_requests_of_an_ingress_that_dies_are_aborted() -> None:
    """Its connection ends; the call stays open, and no frame is due that could not be sent."""
    service, engine = EngineService(_NoAdapters(), time.time, max_queued_requests=512, idle_s=60.0), _Engine()
    service.start(engine)
    async with opened() as frame_socket:
        call = service.packed_frames(LINK, frame_socket)
        connection = await connected()
        reader = frames_from_socket(call, LINK, connection)
        assert unpack_frame(await anext(reader)) == []
        waiting = asyncio.ensure_future(anext(reader))
        assert service.submit(LINK, [GenerateRequest("a/1", "t", (1, 2), SamplingParams())])
        assert engine.running == {"a/1"}
        while frame_socket.num_connections == 0:
            await asyncio.sleep(0.01)
        connection[1].transport.abort()
        with pytest.raises(StopAsyncIteration):
            await waiting
        assert engine.running == set()
        assert service.num_links == 0


async def test_a_replica_that_dies_in_a_frame_ends_the_link_as_its_call_does() -> None:
    async def call() -> AsyncGenerator[bytes]:
        """Of a replica that Ray finds dead a little later."""
        yield b"attached"
        await asyncio.sleep(0.2)
        raise ConnectionResetError("found dead")

    async def half_a_frame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(frame_sockets._LENGTH.pack(4) + b"full" + frame_sockets._LENGTH.pack(100) + b"half")
        writer.close()

    server = await asyncio.start_unix_server(half_a_frame, str(frame_sockets._path("replica")))
    reader = frames_from_socket(call(), LINK, await connected())
    assert [await anext(reader), await anext(reader)] == [b"attached", b"full"]
    with pytest.raises(ConnectionResetError, match="found dead"):
        await anext(reader)
    server.close()


async def test_a_replica_that_hangs_is_given_up_though_its_connection_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "HEARTBEAT_S", 0.005)
    ended = asyncio.Event()

    async def call() -> AsyncGenerator[bytes]:
        yield b"attached"
        await asyncio.Event().wait()

    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(frame_sockets._LENGTH.pack(4) + b"full" + frame_sockets._LENGTH.pack(100) + b"half")
        assert await reader.read() == b"", "the ingress closes its end: its requests are aborted when the replica wakes"
        writer.close()
        ended.set()

    server = await asyncio.start_unix_server(hangs, str(frame_sockets._path("replica")))
    reader = frames_from_socket(call(), LINK, await connected())
    assert [await anext(reader), await anext(reader)] == [b"attached", b"full"]
    with pytest.raises(ReplicaUnreachable, match="no heartbeat of the replica"):
        await anext(reader)
    async with asyncio.timeout(60):
        await ended.wait()
    server.close()


@pytest.mark.parametrize("ends_first", ["connection", "call"])
async def test_a_link_ends_though_only_half_of_it_does(monkeypatch: pytest.MonkeyPatch, ends_first: str) -> None:
    monkeypatch.setattr(frame_sockets, "END_TIMEOUT_S", 0.2)
    done = asyncio.Event()

    async def call() -> AsyncGenerator[bytes]:
        yield b"attached"
        if ends_first == "connection":
            await done.wait()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if ends_first == "call":
            await done.wait()
        writer.close()

    server = await asyncio.start_unix_server(greet, str(frame_sockets._path("replica")))
    reader = frames_from_socket(call(), LINK, await connected())
    assert await anext(reader) == b"attached"
    with pytest.raises(ReplicaUnreachable if ends_first == "connection" else StopAsyncIteration):
        await anext(reader)
    done.set()
    server.close()


async def test_a_connection_that_nobody_expects_is_closed() -> None:
    async with opened():
        for greeting in (b"\n", b"another-link\n", b"\xff\xfe\n", b"x" * 200_000):
            reader, writer = await connected()
            writer.write(greeting)
            with suppress(ConnectionResetError):  # it has not read to the end
                assert await reader.read() == b""
            writer.close()


async def test_without_a_greeting_the_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_sockets, "CONNECT_TIMEOUT_S", 0.1)
    hub = FrameHub()
    async with opened() as frame_socket:
        call = frame_socket.carry(LINK, hub.frames(LINK, lambda: 60.0), unheard)
        assert unpack_frame(await anext(call)) == []
        with pytest.raises(TimeoutError):
            await anext(call)


async def test_a_replica_elsewhere_is_reached_through_its_call_only(folder: Path) -> None:
    assert await connect("replica") is None
    async with opened():
        assert [path.name for path in folder.iterdir()] == [f"replica{frame_sockets._suffix()}"]
    assert list(folder.iterdir()) == []
    assert await connect("replica") is None


async def test_sockets_of_the_dead_are_removed_and_those_of_the_living_stay(folder: Path) -> None:
    async with opened("living"):
        dead = socket.socket(socket.AF_UNIX)
        ending = frame_sockets._suffix()
        dead.bind(str(folder / f"dead{ending}"))
        dead.close()
        async with opened("new"):
            assert {path.name for path in folder.iterdir()} == {f"living{ending}", f"new{ending}"}
            for replica_id in ("living", "new"):
                await hang_up(await connected(replica_id))


@pytest.mark.parametrize("has_boot_id", [True, False])
async def test_sockets_of_other_machines_are_left_alone(
    folder: Path, has_boot_id: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On storage shared by machines, sockets of other machines have no listener here and must stay."""
    boot_id = tmp_path / "boot_id"
    monkeypatch.setattr(frame_sockets, "_BOOT_ID", boot_id)
    folder.mkdir(mode=0o700)
    for machine in ("machine1", "machine2"):
        monkeypatch.setattr(frame_sockets.platform, "node", lambda machine=machine: machine)
        if has_boot_id:
            boot_id.write_text(f"{machine}-4a5b")
        assert frame_sockets._suffix() == f".{machine}.sock"
        with socket.socket(socket.AF_UNIX) as nobody_listens:
            nobody_listens.bind(str(folder / f"replica.{machine}.sock"))
    async with opened("new"):
        names = {path.name for path in folder.iterdir()}
    assert names == {"replica.machine1.sock", "new.machine2.sock"}


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
async def test_a_folder_that_others_may_enter_is_not_used(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "a link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    else:
        folder.touch()
    with caplog.at_level(logging.WARNING):
        async with opened():
            assert not folder.is_dir() or list(folder.iterdir()) == []
        assert await connect("replica") is None
    assert [record.message.count(str(folder)) for record in caplog.records] == [1, 1]


async def test_the_usual_folder_is_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setattr(frame_sockets.tempfile, "gettempdir", lambda: str(tmp_path))
    before = os.umask(0)
    try:
        async with opened():
            usual = tmp_path / f"polylora-{os.getuid()}"
            assert usual.stat().st_mode & 0o777 == 0o700
            await hang_up(await connected())
    finally:
        os.umask(before)


async def test_a_path_too_long_for_a_socket_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / ("x" * 120)))
    with caplog.at_level(logging.WARNING):
        async with opened():
            assert await connect("replica") is None
    assert "too long" in caplog.text
