"""Folders that only the service's own user can enter: its state, its sockets, Ray's temporary files."""

from __future__ import annotations

import os
from pathlib import Path

from app.engine.errors import ConfigError

#: Of every process of the service: what it creates is for its own user.
UMASK = 0o077


def make_private(folder: Path, *, is_ours: bool = True) -> Path:
    """Create the folder with mode 0700, or remove the permissions of other users from one that exists.

    `is_ours`: whether the folder is for the service alone; otherwise an existing one is refused instead of changed.
    Raises ConfigError for a folder of another user, one that all users could write to, a link, and what is no folder or
    cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"{folder} is no folder and cannot become one ({error.strerror})") from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise _not_private(folder, f"belongs to another user (id {found.st_uid})")
        if found.st_mode & 0o002:  # what is in it may be another user's
            raise _not_private(folder, "can be written by every user")
        if found.st_mode & 0o077 and not is_ours:
            raise _not_private(folder, "can be entered by other users")
        if found.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return folder


def _not_private(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{folder} {what}; remove it, make it private (chown, chmod 700), or choose another folder, for example one "
        "inside it"
    )
