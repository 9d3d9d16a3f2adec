"""The tiny service on the JAX engine, as `configs/serve-jax.yaml` sets it, but for the model and its sizes.

Its processes have no folder for sockets, as if each were on a machine of its own: frames come through Ray.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from app.deployments.rpc.uds_transport import FOLDER_VARIABLE
from load_tests.service import ROOT
from tests.e2e.service.conftest import Service, running_service
from tests.nightly import mark_folder


@pytest.hookimpl(tryfirst=True)  # before nightly tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nightly: by day tests/engine/xla has the engine, and tests/e2e/service the service on another one."""
    mark_folder(items, __file__, pytest.mark.e2e, pytest.mark.nightly)


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    document = yaml.safe_load((ROOT / "configs/serve-jax.yaml").read_text())
    engine = document["applications"][0]["args"]["engine"]
    xla = engine["xla"] | {"compilation_cache_dir": str(folder / "xla")}
    settings = engine | {"max_model_len": 1024, "xla": xla}
    sockets = folder / "sockets"
    sockets.touch()  # not a folder
    with running_service(folder, settings, 1, {FOLDER_VARIABLE: str(sockets)}) as started:
        yield started
