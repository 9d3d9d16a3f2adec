"""Transport of frames through a Unix socket, between processes of one machine.

Every step yields a frame, and reading it from a Ray stream is most of what a lone stream's token costs its ingress.
Ray's call stays open without items: it begins the link, and its end says why the link ended.

Sockets lie in a folder that no other user can enter, so frames from there are ours. Processes that do not
share the folder (other machines, containers, users) send frames through Ray's call. The folder may lie on storage
shared by machines: a socket's name ends with its machine's id, and other machines' sockets are ignored.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import platform
import socket
import struct
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.deployments.rpc.frames import HeartbeatTimeout, heartbeat_lost, pack_frame
from app.deployments.rpc.transport import Frame, ReplicaUnreachable
from app.engine.errors import ConfigError
from app.private_folder import make_private

logger = logging.getLogger(__name__)

#: Environment variable with the sockets' folder; the default is in the system's folder for temporary files.
FOLDER_VARIABLE = "POLYLORA_SOCKETS"
#: An attached ingress must send its link id through its connection within this time.
CONNECT_TIMEOUT_S = 10.0
#: Longest time between the end of the call and the end of the connection.
END_TIMEOUT_S = 5.0

#: Differs after each boot (Linux).
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_LENGTH = struct.Struct("<I")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class FrameSocket:
    """A replica's end: a listening socket, and the links whose connections it expects. One event loop."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._path: Path | None = None
        self._server: asyncio.Server | None = None
        self._expected: dict[str, asyncio.Future[Connection]] = {}
        self.num_connections = 0

    async def open(self) -> None:
        """Listen, and remove sockets of dead replicas. If that fails, links use Ray."""
        try:
            path = _path(self._replica_id)
            listening = _listen(path)
        except OSError as error:
            logger.warning("cannot open a socket for frames, using Ray: %s", error)
            return
        self._path = path
        self._server = await asyncio.start_unix_server(self._accept, sock=listening)
        _remove_stale_sockets(path.parent)

    def close(self) -> None:
        """Accept no more connections; existing ones live as long as their links."""
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def carry(
        self, link_id: str, frames: AsyncGenerator[Frame], close_link: Callable[[], None]
    ) -> AsyncGenerator[bytes]:
        """Send a link's frames through its connection; yields only the first, as the call's item. Ends or raises like
        `frames`.

        `close_link` is called when the ingress closes the connection; it must end `frames`. Raises TimeoutError if no
        connection arrives.
        """
        connection = self._expected[link_id] = asyncio.get_running_loop().create_future()
        try:
            yield pack_frame(await anext(frames))
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await connection
        finally:
            del self._expected[link_id]
        closed = asyncio.ensure_future(_until_closed(reader))
        closed.add_done_callback(lambda task: None if task.cancelled() else close_link())
        self.num_connections += 1
        try:
            async for frame in frames:
                packed = pack_frame(frame)
                writer.write(_LENGTH.pack(len(packed)) + packed)
                await writer.drain()
        except ConnectionError:  # the ingress is gone; the link ends
            return
        finally:
            self.num_connections -= 1
            closed.cancel()
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the link id from a new connection, and pass the connection to its link."""
        try:
            link_id = (await reader.readline()).decode("ascii", "replace").rstrip("\n")
        except (ConnectionError, ValueError):  # ValueError: no line within 64 KiB
            link_id = ""
        expected = self._expected.get(link_id)
        if expected is None or expected.done():
            writer.close()
        else:
            expected.set_result((reader, writer))


async def connect(replica_id: str) -> Connection | None:
    """A connection to a replica's socket; None if this process cannot reach it."""
    try:
        return await asyncio.open_unix_connection(str(_path(replica_id)))
    except (FileNotFoundError, ConnectionRefusedError):  # it is on another machine, or has no socket
        return None
    except OSError as error:
        logger.warning("cannot connect to replica %s, using Ray for frames: %s", replica_id, error)
        return None


async def frames_from_socket(call: AsyncIterator[bytes], link_id: str, connection: Connection) -> AsyncGenerator[bytes]:
    """The packed frames of a link with a connection, an empty one first. Ends or raises like the call.

    `call` yields the item of `FrameSocket.carry`. Raises ReplicaUnreachable if the call continues after the connection
    has ended, or if heartbeats stop.
    """
    reader, writer = connection
    end = None
    try:
        if (first := await anext(call, None)) is None:
            return
        writer.write(f"{link_id}\n".encode())
        end = asyncio.ensure_future(anext(call, None))
        end.add_done_callback(_retrieve)
        end.add_done_callback(lambda _: asyncio.get_running_loop().call_later(END_TIMEOUT_S, writer.transport.abort))
        yield first
        async for packed in _receive_frames(reader):
            yield packed
        async with asyncio.timeout(END_TIMEOUT_S):
            await end
    except TimeoutError:
        raise ReplicaUnreachable("the replica closed a link's connection without a reason") from None
    finally:
        if end is not None:
            end.cancel()
        writer.close()


async def _receive_frames(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """Frames until the other side closes the connection or dies; a partial frame is dropped.

    Raises ReplicaUnreachable if heartbeats stop: the other side hangs or is suspended.
    """
    heartbeat = HeartbeatTimeout(lambda: reader.set_exception(heartbeat_lost()))
    try:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                yield await reader.readexactly(size)
                heartbeat.reset()
    finally:
        heartbeat.close()


def _retrieve(call: asyncio.Future[Any]) -> None:
    """Retrieve the call's error if its reader has already left; otherwise asyncio would log it."""
    if not call.cancelled():
        call.exception()


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read(1)  # the ingress sends nothing more


def _path(replica_id: str) -> Path:
    return _folder() / f"{replica_id}{_suffix()}"


def _suffix() -> str:
    """Suffix of this machine's sockets. Its containers have other hostnames but one kernel, and may share the
    folder."""
    with suppress(OSError):
        return f".{_BOOT_ID.read_text()[:8]}.sock"
    return f".{platform.node()}.sock"


def _folder() -> Path:
    """The sockets' folder, created if missing. Raises PermissionError if it belongs to another user."""
    default = Path(tempfile.gettempdir(), f"polylora-{os.getuid()}")
    folder = Path(os.environ.get(FOLDER_VARIABLE) or default)
    try:
        return make_private(folder)
    except ConfigError as error:
        raise PermissionError(errno.EACCES, str(error)) from error


def _listen(path: Path) -> socket.socket:
    """A listening socket; its path appears only once it listens."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_suffix(".new")
    try:
        new.unlink(missing_ok=True)
        listening.bind(str(new))
        listening.listen(128)
        new.rename(path)
    except OSError:
        listening.close()
        raise
    return listening


def _remove_stale_sockets(folder: Path) -> None:
    """Remove sockets of this machine without a listener."""
    for path in folder.glob(f"*{_suffix()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.info("cannot remove socket %s: %s", path, error)
