"""The image, built once for all tests of this folder; about ten minutes, most of them for downloads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engine.models.download.model_download import DEFAULT_EMBEDDER_URI, DEFAULT_MODEL_URI, resolve_model
from app.kernels.machine.disk_cache import default_cache_dir
from tests.e2e.image.build import Image, build
from tests.nightly import mark_folder

#: Programs of this machine that build and run it, and their Debian packages.
PROGRAMS = {"mmdebstrap": "mmdebstrap", "unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}


@pytest.hookimpl(tryfirst=True)  # before nightly tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_folder(items, __file__, pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(3600))


@pytest.fixture(scope="package")
def image() -> Iterator[Image]:
    """With what the manifest for Kubernetes needs beside the CPU engine."""
    if os.geteuid() != 0:
        pytest.skip("not root: a chroot and its mounts need it")
    if missing := sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None}):
        pytest.skip(f"the image is built with {', '.join(missing)}: apt-get install {' '.join(missing)}")
    folder = Path(tempfile.mkdtemp(prefix="polylora-image"))
    folder.chmod(0o755)
    try:
        yield build(folder, {"EXTRAS": "[postgres,s3]"})
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="package")
def cache(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume for /var/cache/polylora: the demo model and its embedder are there; kernels are compiled into it."""
    for uri in (DEFAULT_MODEL_URI, DEFAULT_EMBEDDER_URI):
        resolve_model(uri)
    folder = tmp_path_factory.mktemp("cache")
    shutil.copytree(default_cache_dir() / "pypi", folder / "pypi")
    give(folder, image)
    return folder


def give(folder: Path, image: Image) -> None:
    """Make everything in a folder the image's user's own."""
    uid, gid, _ = image.account()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, gid)
