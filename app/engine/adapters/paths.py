"""Resolves a client's adapter path to an existing path under a root that the operator allows.

A root may be a symbolic link; nothing under it may. So a path lies where its text says, and a project's folder under a
root is a boundary. Anything outside the roots is `UnsafeSource`, with the same answer whether it exists or not. Links
that are swapped in after the check are refused when the files are opened (`open_plain_file`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from app.engine.adapters.strict_json import short
from app.engine.errors import NotFound, UnsafeSource

_MAX_CHARS = 4096
#: A hub repository's name.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_WAY_OUT = "put the adapter under one of them: adapters.roots, or LORA_PATH when the service is started"


def resolve_adapter_path(path_or_name: str, roots: Sequence[Path]) -> Path:
    """The adapter folder or card at `path_or_name`: absolute, or relative to the first root that has it.

    Raises `UnsafeSource` for anything that leaves the roots (an absolute path elsewhere, "..") and for symbolic links,
    `NotFound` for a path under a root that does not exist.
    """
    if not roots:
        raise UnsafeSource("this server reads no local adapters; set LORA_PATH to the folder that holds them")
    if not path_or_name or len(path_or_name) > _MAX_CHARS or "\0" in path_or_name:
        raise UnsafeSource(
            f"{short(path_or_name)} is not a path: it is empty, over {_MAX_CHARS} characters or has a NUL"
        )
    requested = Path(path_or_name)
    if ".." in requested.parts:
        raise UnsafeSource(f"{short(path_or_name)} contains '..'; name a folder under the server's adapter roots")

    # A root's file system may hang, and those of the others not: look at no more roots than needed.
    is_inside = not requested.is_absolute()
    for root in sorted(roots, key=lambda root: not _is_under(requested, (root.absolute(),))):
        real_root = _real(root)
        is_here = not requested.is_absolute() or _is_under(requested, (root.absolute(), real_root or root))
        is_inside = is_inside or is_here
        if real_root is None or not is_here:
            continue
        found = _existing(real_root, _below(requested, root, real_root), path_or_name)
        if found is not None:
            return found
    if not is_inside:
        raise UnsafeSource(f"{short(path_or_name)} is outside the server's adapter roots; {_WAY_OUT}")
    may_be_hubs = _REPOSITORY.fullmatch(path_or_name) and not any(
        os.path.lexists(root / requested.parts[0]) for root in roots
    )
    hint = f"; a repository of the hub is written 'hf://{path_or_name}@main'" if may_be_hubs else ""
    raise NotFound(f"there is no adapter at {short(path_or_name)} under the server's adapter roots{hint}")


def named_path(text: str) -> Path:
    """The path of an adapter that the user of a command or library names: links above it are followed, it may be none.

    Absolute, so that `open_plain_file` opens its files.
    """
    path = Path(os.path.abspath(text))  # resolve() would follow the last part, too
    return path.parent.resolve() / path.name


def _real(path: Path) -> Path | None:
    """`path` with every link followed; None if it does not exist, loops, or cannot be a file name."""
    try:
        return Path(os.path.realpath(path, strict=True))
    except (OSError, ValueError):  # ValueError: text that no file system name encodes
        return None


def _is_under(path: Path, roots: Sequence[Path]) -> bool:
    return any(root != path and root in path.parents for root in roots)


def _below(requested: Path, root: Path, real_root: Path) -> Path:
    """The part of `requested` below this root, which it is under."""
    if not requested.is_absolute():
        return requested
    return requested.relative_to(real_root if real_root in requested.parents else root.absolute())


def _existing(real_root: Path, relative: Path, requested: str) -> Path | None:
    """The path below the root if it exists, checked part by part. Raises UnsafeSource for the root itself or a link."""
    if not relative.parts:
        raise UnsafeSource(f"{short(requested)} is not a path below the server's adapter roots; {_WAY_OUT}")
    path = real_root
    for part in relative.parts:
        path /= part
        try:
            mode = path.lstat().st_mode
        except (OSError, ValueError):  # ValueError: text that no file system name encodes
            return None
        if stat.S_ISLNK(mode):
            raise UnsafeSource(
                f"{short(requested)} leads through {short(part)}, a symbolic link; links under the server's adapter "
                "roots are not followed, so put the folder itself there"
            )
    return path
