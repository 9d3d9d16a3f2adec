"""Confinement of a process that handles untrusted input: no network, no other program, no file but its input.

Landlock (Linux 5.13) limits the files that can be opened; a seccomp filter denies system calls (x86-64 and arm64). A
denied call fails with an error as for missing permission, so a library that tries one goes on as it would then. Where
the kernel lacks one of the two the other is used alone, and `confinement_gaps` says what is missing.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS = 38

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION_FLAG, _LANDLOCK_RULE_PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
#: Landlock's version → number of rights on files that it handles; a later version handles what this table ends with.
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_ALL_TCP = 0b11
#: Abstract Unix sockets and signals to processes outside.
_SCOPES = 0b11

_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_OF_CALL, _OFFSET_OF_ARCHITECTURE, _OFFSET_OF_ARGUMENTS = 0, 4, 16
_INSTRUCTION = struct.Struct("<HBBI")

#: A call's numbers on x86-64 and arm64.
_Numbers = tuple[int | None, int | None]
#: Machine → its column in the tables of calls, and its number in the kernel's audit.h.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_SECCOMP = (317, 277)
_CLONE, _CLONE3 = (56, 220), (435, 435)
_OPENAT, _OPENAT2 = (257, 56), (437, 437)
_OPEN: _Numbers = (2, None)
_PRLIMIT64 = (302, 261)
#: Calls from here on are newer than this table; the kernel may lack them, so every library works without.
_FIRST_UNKNOWN = 451
_CLONE_THREAD = 0x10000
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Denied calls.
_DENIED: dict[str, _Numbers] = {
    # network and other processes' memory
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # programs and processes
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "kcmp": (312, 272), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # files
    "creat": (85, None), "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None),
    "mknodat": (259, 33), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "ioctl": (16, 29),
    # ways around this filter, and parts of the kernel that nothing here needs
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "personality": (135, 92), "modify_ldt": (154, None),
    # what an administrator may do: a service may run as root
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "syslog": (103, 116), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "iopl": (172, None), "ioperm": (173, None),
}  # fmt: skip


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine_process(readable: Sequence[Path] = ()) -> None:
    """Confine the calling process, which has one thread, for the rest of its life. Open descriptors stay usable.

    Files can be opened for reading below the paths in `readable`, and no others; a path that does not exist is left
    out. A Python module that is not loaded yet is not found. What the kernel cannot deny stays possible
    (`confinement_gaps`). Raises OSError if it can and fails.
    """
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter]
    has_landlock, has_seccomp = _landlock_version() > 0, _can_filter()
    if has_landlock or has_seccomp:
        _raise_on_error(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if has_landlock:
        _restrict_files(readable)
    if has_seccomp:
        program = b"".join(_filter_instructions(can_open=bool(readable), has_landlock=has_landlock))
        prog = _FilterProgram(len(program) // _INSTRUCTION.size, program)
        _raise_on_error(_syscall(_SECCOMP[_machine()[0]], _SET_MODE_FILTER, 0, ctypes.addressof(prog)))


def confinement_gaps() -> list[str]:
    """What a process can do after `confine_process` because the kernel cannot deny it, with the reason."""
    gaps = []
    if not _landlock_version():
        gaps.append(
            "can read every file of this service's user: the kernel offers no Landlock (Linux 5.13, lsm=landlock)"
        )
    if not _can_filter():
        gaps.append(
            "can open connections and start programs: the kernel offers no seccomp filters (Linux on x86-64 or arm64)"
        )
    return gaps


@functools.cache
def _landlock_version() -> int:
    """0 where there is no Landlock."""
    if sys.platform != "linux":
        return 0
    return max(_syscall(_LANDLOCK_CREATE_RULESET, 0, 0, _LANDLOCK_VERSION_FLAG), 0)


@functools.cache
def _can_filter() -> bool:
    if sys.platform != "linux" or platform.machine() not in _MACHINES or sys.byteorder != "little":
        return False
    action = ctypes.c_uint32(_ERRNO)
    return _syscall(_SECCOMP[_machine()[0]], _GET_ACTION_AVAIL, 0, ctypes.addressof(action)) == 0


def _machine() -> tuple[int, int]:
    return _MACHINES[platform.machine()]


def _restrict_files(readable: Sequence[Path]) -> None:
    version = _landlock_version()
    file_rights = (1 << _NUM_FILE_RIGHTS.get(version, max(_NUM_FILE_RIGHTS.values()))) - 1
    attributes = struct.pack("<QQQ", file_rights, _ALL_TCP, _SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _raise_on_error(_syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0))
    try:
        for path in readable:
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                rights = _READ_FILE | (_READ_DIR if path.is_dir() else 0)
                rule = struct.pack("<Qi", rights, descriptor)
                _raise_on_error(_syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0))
            finally:
                os.close(descriptor)
        _raise_on_error(_syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _filter_instructions(*, can_open: bool, has_landlock: bool) -> Iterator[bytes]:
    """The seccomp filter: runs for each system call and returns what becomes of it.

    Only Landlock sees what `openat2` wants, which is in memory; without it the call is denied as unknown.
    """
    column, architecture = _machine()
    refuse, unknown = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    opens = (_OPEN, _OPENAT, _OPENAT2)
    answers = dict.fromkeys(_DENIED.values(), refuse) | {_CLONE3: unknown}  # the C library then takes clone
    if not can_open:
        answers |= dict.fromkeys(opens, refuse)
    elif not has_landlock:
        answers[_OPENAT2] = unknown
    #: (call, its argument, bits, what becomes of it with one of the bits, without)
    by_argument: list[tuple[_Numbers, int, int, int, int]] = [
        (_CLONE, 0, _CLONE_THREAD, _ALLOW, refuse),
        (_PRLIMIT64, 0, 0xFFFFFFFF, refuse, _ALLOW),
    ]
    if can_open:
        by_argument += [(_OPEN, 1, _WRITE_FLAGS, refuse, _ALLOW), (_OPENAT, 2, _WRITE_FLAGS, refuse, _ALLOW)]
    instruction = _INSTRUCTION.pack
    yield instruction(_LOAD, 0, 0, _OFFSET_OF_ARCHITECTURE)
    yield instruction(_JUMP_EQUAL, 1, 0, architecture)
    yield instruction(_RETURN, 0, 0, _KILL_PROCESS)
    yield instruction(_LOAD, 0, 0, _OFFSET_OF_CALL)
    yield instruction(_JUMP_AT_LEAST, 0, 1, _FIRST_UNKNOWN)
    yield instruction(_RETURN, 0, 0, unknown)
    for numbers, answer in answers.items():
        if (number := numbers[column]) is not None:
            yield instruction(_JUMP_EQUAL, 0, 1, number)
            yield instruction(_RETURN, 0, 0, answer)
    for numbers, argument, bits, with_bits, without in by_argument:
        if (number := numbers[column]) is not None:
            yield instruction(_JUMP_EQUAL, 0, 4, number)
            yield instruction(_LOAD, 0, 0, _OFFSET_OF_ARGUMENTS + 8 * argument)
            yield instruction(_JUMP_ANY_BIT, 0, 1, bits)
            yield instruction(_RETURN, 0, 0, with_bits)
            yield instruction(_RETURN, 0, 0, without)
    yield instruction(_RETURN, 0, 0, _ALLOW)


def _syscall(number: int, *arguments: int | bytes) -> int:
    """-1 on error, with errno set."""
    converted = [ctypes.c_char_p(each) if isinstance(each, bytes) else ctypes.c_long(each) for each in arguments]
    return int(_LIBC.syscall(ctypes.c_long(number), *converted))


def _raise_on_error(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot confine this process: {os.strerror(code)}")
    return result
