"""Folders that other users must not enter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.engine.errors import ConfigError
from app.private_folder import make_private


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_folder_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert mode(make_private(tmp_path / "a" / "b")) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("old", [0o755, 0o750, 0o770, 0o711])
def test_a_folder_of_this_user_becomes_private(tmp_path: Path, old: int) -> None:
    tmp_path.chmod(old)
    assert mode(make_private(tmp_path)) == 0o700
    tmp_path.chmod(old)
    with pytest.raises(ConfigError, match="can be entered by other users"):
        make_private(tmp_path, is_ours=False)
    assert mode(tmp_path) == old


@pytest.mark.parametrize("old", [0o777, 0o1777, 0o702])
def test_a_folder_that_anybody_could_fill_is_refused(tmp_path: Path, old: int) -> None:
    tmp_path.chmod(old)
    with pytest.raises(ConfigError, match=rf"^{tmp_path} can be written by every user; .*chmod 700"):
        make_private(tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=rf"belongs to another user \(id {user}\)"):
        make_private(tmp_path)


@pytest.mark.parametrize("kind", ["a link", "a file", "below a file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    with pytest.raises(ConfigError, match="is no folder and cannot become one"):
        make_private(folder / "inside" if kind == "below a file" else folder)
