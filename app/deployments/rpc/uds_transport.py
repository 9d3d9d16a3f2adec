"""Frames between processes of one machine go through a Unix socket beside Ray's call.

In: a link's frames on the replica's side, and the call that opened the link on the ingress's side. Out: the same frames
in the same order. Every step yields a frame, and taking it from a stream of Ray's is most of what a lone stream's token
costs its ingress. The call stays open and carries nothing else: it begins the link, and its end says why the link
ended.

Sockets lie in a folder that no other user can enter, so that what comes from there is ours (frames are pickles).
Processes that do not share it (other machines, containers, users) do without: their frames are the call's items. The
folder may lie on storage that machines share: a socket's name ends with its machine, and another's is left alone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import platform
import socket
import stat
import struct
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.deployments.rpc.frames import HeartbeatTimeout, pack_frame, silent
from app.deployments.rpc.transport import Frame, ReplicaUnreachable

logger = logging.getLogger(__name__)

#: Another folder for the sockets than the one that is made in the system's folder for temporary files.
FOLDER_VARIABLE = "POLYLORA_SOCKETS"
#: An ingress that was told that it is attached says so through its connection within this time.
GREETING_TIMEOUT_S = 10.0
#: The end of the call and the end of the connection are at most this far apart.
END_TIMEOUT_S = 5.0

#: Another one each time that a kernel starts (Linux).
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
        """Listen, and remove what replicas that died have left. Where that cannot be, links do without."""
        try:
            path = _path(self._replica_id)
            listening = _listen(path)
        except OSError as error:
            logger.warning("no socket for frames, they go through Ray: %s", error)
            return
        self._path = path
        self._server = await asyncio.start_unix_server(self._greet, sock=listening)
        _remove_abandoned(path.parent)

    def close(self) -> None:
        """Take no more connections; those there are live as long as their links."""
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def carry(
        self, link_id: str, frames: AsyncGenerator[Frame], leave: Callable[[], None]
    ) -> AsyncGenerator[bytes]:
        """The items of the call of a link with a connection: its first frame. Ends, or raises, as `frames` does.

        The others are sent through the connection. `exit_actor` is called when the ingress has closed it: it must end
        `frames`. Raises TimeoutError if no connection turns up.
        """
        connection = self._expected[link_id] = asyncio.get_running_loop().create_future()
        try:
            yield pack_frame(await anext(frames))
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                reader, writer = await connection
        finally:
            del self._expected[link_id]
        closed = asyncio.ensure_future(_until_closed(reader))
        closed.add_done_callback(lambda task: None if task.cancelled() else leave())
        self.num_connections += 1
        try:
            async for frame in frames:
                packed = pack_frame(frame)
                writer.write(_LENGTH.pack(len(packed)) + packed)
                await writer.drain()
        except ConnectionError:  # the ingress has ended: so does the link
            return
        finally:
            self.num_connections -= 1
            closed.cancel()
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the name of its link from a new connection, and hand the connection to whoever waits for it."""
        try:
            link_id = (await reader.readline()).decode("ascii", "replace").rstrip("\n")
        except (ConnectionError, ValueError):  # ValueError: no line for 64 KiB
            link_id = ""
        expected = self._expected.get(link_id)
        if expected is None or expected.done():
            writer.close()
        else:
            expected.set_result((reader, writer))


async def connect(replica_id: str) -> Connection | None:
    """A connection to a replica's socket; None if this process cannot reach one."""
    try:
        return await asyncio.open_unix_connection(str(_path(replica_id)))
    except (FileNotFoundError, ConnectionRefusedError):  # it is on another machine, or has no socket
        return None
    except OSError as error:
        logger.warning("frames of replica %s go through Ray: %s", replica_id, error)
        return None


async def frames_beside(call: AsyncIterator[bytes], link_id: str, connection: Connection) -> AsyncGenerator[bytes]:
    """The packed frames of a link with a connection, an empty one first. Ends, or raises, as the call does.

    `call` is what `FrameSocket.carry` yields. Raises ReplicaUnreachable if it goes on though the connection has ended,
    or if nothing comes, not even a heartbeat.
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
        async for packed in _received(reader):
            yield packed
        async with asyncio.timeout(END_TIMEOUT_S):
            await end
    except TimeoutError:
        raise ReplicaUnreachable("it has closed a link's connection and does not say why") from None
    finally:
        if end is not None:
            end.cancel()
        writer.close()


async def _received(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """Frames until the other side closes the connection, or dies; half a frame is dropped.

    Raises ReplicaUnreachable if nothing comes: the other side hangs, or was stopped.
    """
    silence = HeartbeatTimeout(lambda: reader.set_exception(silent()))
    try:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                yield await reader.readexactly(size)
                silence.heard()
    finally:
        silence.close()


def _retrieve(call: asyncio.Future[Any]) -> None:
    """Whoever reads may have left before the call ended; its error is then nobody's."""
    if not call.cancelled():
        call.exception()


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read(1)  # nothing more is said


def _path(replica_id: str) -> Path:
    return _folder() / f"{replica_id}{_ending()}"


def _ending() -> str:
    """Of this machine's sockets. Its containers have other hostnames but one kernel, and may share the folder."""
    with suppress(OSError):
        return f".{_BOOT_ID.read_text()[:8]}.sock"
    return f".{platform.node()}.sock"


def _folder() -> Path:
    """Made if it is not there. Raises PermissionError if others can enter it."""
    default = Path(tempfile.gettempdir(), f"polylora-{os.getuid()}")
    folder = Path(os.environ.get(FOLDER_VARIABLE) or default)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "not a folder of this user alone (chmod 700)", str(folder))
    return folder


def _listen(path: Path) -> socket.socket:
    """A socket that listens from the moment on in which its path is there."""
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


def _remove_abandoned(folder: Path) -> None:
    """Sockets of this machine on which nobody listens any more."""
    for path in folder.glob(f"*{_ending()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.info("%s stays: %s", path, error)
