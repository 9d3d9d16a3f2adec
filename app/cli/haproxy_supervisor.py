"""Restarts HAProxy when it exits, and represents it to Ray.

For Ray this process is HAProxy: the control socket reports its process id, and a signal to it goes to HAProxy. Ray
itself notices only after half a minute that its HAProxy has exited, and no request is answered meanwhile. Here it is
restarted within a tenth of a second; its connections are lost. New ones wait for it, because this process has the
listening socket, and the next supervisor gets it from this one.

When this process is killed, which is also how Ray stops HAProxy, HAProxy is killed too, unless `polylora serve` runs
(`SERVE_PID`): then it goes on with its connections until another replaces it or `polylora serve` ends. A process
between the two, which does nothing else, sees to that.

Ray asks HAProxy through a Unix socket. It gets this process's socket, which forwards the questions to HAProxy's own in
the same folder. A reload is another such process whose command line names the old ones; the new HAProxy gets the old
HAProxys' ids instead. A HAProxy whose manager in Ray died goes on serving until the next one replaces it in the same
way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

#: A HAProxy that ran for less has failed; after this many failures in a row the supervisor gives up.
SHORT_LIFE_S = 1.0
MAX_SHORT_LIVES = 5
#: Pause before a restart after a failure, times the number of failures.
PAUSE_S = 0.2
#: `end_haproxys` waits at most this long for a process that the kernel does not end.
END_TIMEOUT_S = 10.0
#: The process id of `polylora serve`, which starts and ends with its Ray.
SERVE_PID = "POLYLORA_SERVE_PID"
_PR_SET_PDEATHSIG = 1
#: A question to a supervisor, which is answered with a descriptor.
_LISTENER = b"polylora listener\n"


def socket_of(folder: Path, pid: int) -> Path:
    """The control socket of a supervisor's HAProxy."""
    return folder / f"{pid}.sock"


class Supervisor:
    """`config`: HAProxy's file, whose control socket is `socket_of` this process. `admin`: where Ray looks for the
    socket. Both are in the folder of this node. `listener`: the socket that `config` names by its descriptor, if any.
    """

    def __init__(
        self,
        binary: str,
        arguments: Sequence[str],
        config: Path,
        admin: Path,
        ray_config: str,
        listener: socket.socket | None = None,
    ) -> None:
        self._listener = listener
        self._folder = admin.parent
        self._admin = admin
        self._config = config
        self._ray_config = ray_config
        self._pid_file = self._folder / f"{os.getpid()}.pid"
        self._socket = socket_of(self._folder, os.getpid())
        self._replaced = [] if "-sf" in arguments else self._orphans()
        self._first = [binary, *self._translate(arguments)]
        self._again = [binary, *_without_takeover(arguments, config)]
        self._child: asyncio.subprocess.Process | None = None
        self._stop_signal: int | None = None  # the last signal that stops HAProxy
        self._last_lines: deque[str] = deque(maxlen=1)

    async def run(self) -> int:
        """Run until HAProxy has exited for good; returns its exit status."""
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole foreground group
        for number in (signal.SIGUSR1, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        try:
            return await self._keep_running()
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # else it ends the process until it is ignored
            loop.remove_signal_handler(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it may arrive while this process exits
            self._remove_files()

    def _remove_files(self) -> None:
        for path in (self._pid_file, self._part(), self._config, self._socket):
            path.unlink(missing_ok=True)

    async def _keep_running(self) -> int:
        loop = asyncio.get_running_loop()
        server, command, num_short = None, self._first, 0
        while self._stop_signal is None:
            started_s = loop.time()
            await self._start(command)
            assert self._child is not None
            if server is None and await self._is_up():
                server = await self._listen()
                for pid in filter(self._is_supervisor, self._replaced):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)
            status = await self._child.wait()
            await self._reading
            if self._stop_signal is not None or status == 0:
                return max(status, 0)
            num_short = num_short + 1 if loop.time() - started_s < SHORT_LIFE_S else 0
            self._note(status)
            if server is None or num_short >= MAX_SHORT_LIVES:
                return status if status > 0 else 1
            print(f"polylora-haproxy: HAProxy exited with {status}; restarting it", file=sys.stderr, flush=True)
            await asyncio.sleep(PAUSE_S * num_short)
            command = self._again
        return 0

    async def _start(self, command: Sequence[str]) -> None:
        self._child = await asyncio.create_subprocess_exec(
            *command,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=self._become_haproxy,
            restore_signals=False,  # SIGPIPE stays ignored: HAProxy goes on when this process, which reads it, has died
            pass_fds=[] if self._listener is None else [self._listener.fileno()],
            process_group=0,
        )
        self._reading = asyncio.create_task(self._pass_on(self._child))
        if self._stop_signal is not None:  # it arrived while no HAProxy was running
            self._signal(self._stop_signal)

    def _become_haproxy(self) -> None:
        """In the child before exec: write the pid file, so that every running HAProxy is named by a complete file."""
        if (serve_pid := os.environ.get(SERVE_PID)) and _has_pidfds():
            supervisor = os.getppid()
            if haproxy := os.fork():
                self._outlive(supervisor, haproxy, int(serve_pid))
        _die_with_parent()
        self._part().write_text(str(os.getpid()), encoding="utf-8")
        self._part().replace(self._pid_file)

    def _outlive(self, supervisor: int, haproxy: int, serve_pid: int) -> NoReturn:
        """In the process between supervisor and HAProxy: exit with HAProxy, and end it when `polylora serve` ends."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda signum, _: os.kill(haproxy, signum))
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        running = select.poll()
        try:
            for pid in (haproxy, serve_pid):
                running.register(os.pidfd_open(pid), select.POLLIN)
            running.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(haproxy, signal.SIGKILL)  # it has exited, or `polylora serve` has
            status = os.waitstatus_to_exitcode(os.waitpid(haproxy, 0)[1])
            if os.getppid() != supervisor:
                self._remove_files()
            os._exit(128 - status if status < 0 else status)

    def _part(self) -> Path:
        """The pid file while it is incomplete."""
        return self._pid_file.with_suffix(".part")

    async def _pass_on(self, child: asyncio.subprocess.Process) -> None:
        """Copy HAProxy's output, and remember its last line, or the one before it that names a port in use."""
        assert child.stderr is not None
        async for line in child.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
            if b"failed to start their listeners" not in line:
                self._last_lines.append(line.decode(errors="replace").strip())

    async def _is_up(self) -> bool:
        """Whether HAProxy answers; waits until it does or has exited."""
        assert self._child is not None
        while self._child.returncode is None:
            with contextlib.suppress(OSError):
                await self._query(b"show info\n")
                return True
            await asyncio.sleep(0.02)
        return False

    async def _listen(self) -> asyncio.Server:
        """Replace the socket at the path where Ray asks."""
        new = self._folder / f"{os.getpid()}.new"
        new.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._hand_on, new)
        new.chmod(0o600)
        new.replace(self._admin)
        return server

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one question to HAProxy, or answer the next supervisor's."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            question = await reader.readline()
            if question == _LISTENER and self._listener is not None:
                with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as asker:
                    socket.send_fds(asker, [b"\n"], [self._listener.fileno()])
                return
            answer = await self._query(question)
            writer.write(re.sub(rb"(?m)^Pid: \d+", b"Pid: %d" % os.getpid(), answer))
            await writer.drain()

    async def _query(self, question: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(question)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()

    def _stop(self, number: int) -> None:
        if self._listener is not None:
            self._listener.close()  # what this HAProxy no longer accepts must not wait for it
            self._listener = None
        self._stop_signal = number
        self._signal(number)

    def _signal(self, number: int) -> None:
        """Send HAProxy a signal, if it runs; a process in between passes it on.

        `send_signal` would first collect the status of a process that has just exited, and asyncio, which waits for it
        too, would then report 255.
        """
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def _note(self, status: int) -> None:
        """Record why HAProxy exited; `polylora serve` prints it when the start fails."""
        reason = self._last_lines[-1] if self._last_lines else f"its exit status is {status}"
        with (self._folder / "failures").open("a", encoding="utf-8") as file:
            file.write(f"{reason}\n")

    def _translate(self, arguments: Sequence[str]) -> list[str]:
        """The command line with HAProxys instead of their supervisors."""
        old = [int(word) for word in arguments if word.isdigit()] if "-sf" in arguments else self._replaced
        children = [child for pid in old if (child := self._child_of(pid)) is not None]
        sockets = [path for pid in old if (path := socket_of(self._folder, pid)).exists()]
        takeover = ["-sf", *map(str, children)] if children else []
        # Not from orphans: HAProxy does not start if one answers no more because it drains or hangs.
        transfer = ["-x", str(sockets[0])] if sockets and "-x" in arguments else []
        return [*_without_takeover(arguments, self._config), *transfer, *takeover]

    def _child_of(self, pid: int) -> int | None:
        """The HAProxy of a supervisor; None if it has no pid file."""
        return _pid_in(self._folder / f"{pid}.pid")

    def _orphans(self) -> list[int]:
        """Supervisors of this folder that have lost their manager in Ray, and those that their HAProxy has outlived."""
        pids = [int(path.stem) for path in self._folder.glob("*.pid") if path.stem.isdigit()]
        return [pid for pid in pids if self._is_supervisor(pid) or _running_haproxy(self._folder / f"{pid}.pid")]

    def _is_supervisor(self, pid: int) -> bool:
        return self._ray_config in _command_line(pid)


def bound_socket(admin: Path, host: str, port: int) -> socket.socket:
    """A TCP socket for HAProxy to listen on: that of the supervisor at `admin` if it has this address, or a new one.

    An empty host or `*`: all IPv4 addresses. Raises OSError, also if another service of this user has the address.
    """
    found = socket.getaddrinfo(host.replace("*", "") or "0.0.0.0", port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(1.0)
        asker.connect(str(admin))
        asker.sendall(_LISTENER)
        for descriptor in socket.recv_fds(asker, 1, 1)[1]:
            listener = socket.socket(fileno=descriptor)
            if listener.getsockname() == address:
                return listener
            listener.close()
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if any(map(_running_haproxy, admin.parent.glob("*.pid"))):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # beside a HAProxy whose supervisor has died
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # for the next one, if this supervisor dies
    except OSError:
        listener.close()
        raise
    return listener


def end_haproxys(folder: Path) -> None:
    """Kill the HAProxys of a folder, and return when their ports are free, or after `END_TIMEOUT_S`."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    for pid_file in list(folder.glob("*.pid")):
        while (haproxy := _running_haproxy(pid_file)) is not None and time.monotonic() < deadline_s:
            _kill(haproxy, deadline_s)


def _kill(pid: int, deadline_s: float) -> None:
    """Kill a process, and wait until its last thread has ended, which is when its ports are free."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has ended, or this system has no such descriptors
        descriptor = -1
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if descriptor == -1:
        time.sleep(0.02)
        return
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll(max(deadline_s - time.monotonic(), 0) * 1000)
    finally:
        os.close(descriptor)


def _running_haproxy(pid_file: Path) -> int | None:
    """The HAProxy that a supervisor's file names, if it is one that still runs with that supervisor's configuration."""
    haproxy = _pid_in(pid_file)
    is_running = haproxy is not None and str(pid_file.with_suffix(".cfg")) in _command_line(haproxy)
    return haproxy if is_running else None


def _pid_in(pid_file: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return int(pid_file.read_text(encoding="utf-8"))
    return None


def _command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _without_takeover(arguments: Sequence[str], config: Path) -> list[str]:
    """The command line for a HAProxy with our configuration that replaces no other."""
    remaining: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "-x":
            next(words)
        elif word == "-f":
            next(words)
            remaining += ["-f", str(config)]
        elif word != "-sf" and not word.isdigit():
            remaining.append(word)
    return remaining


def _has_pidfds() -> bool:
    """Whether a process can wait for another: not before Linux 5.3, nor where a container's filter forbids it. HAProxy
    then dies with its supervisor."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
