"""The application as Serve is told of it."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings

import pytest

from app.config import INGRESS_DRAIN_MARGIN_S

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported: pydantic's deprecations
    from ray.serve._private.replica import _load_deployment_def_from_import_path

    from app.main import ENGINE_CLASS, INGRESS_CLASS, build


@pytest.mark.parametrize("request_timeout_s", [600.0, 7200.0])
def test_an_ingress_drains_for_as_long_as_a_request_may_last(request_timeout_s: float) -> None:
    ingress = build({"limits": {"request_timeout_s": request_timeout_s}})._bound_deployment
    options = ingress._deployment_config
    assert (ingress.name, options.graceful_shutdown_timeout_s) == (
        "Ingress",
        request_timeout_s + INGRESS_DRAIN_MARGIN_S,
    )


@pytest.mark.parametrize("path", [ENGINE_CLASS, INGRESS_CLASS])
def test_a_replica_finds_its_class(path: str) -> None:
    found = _load_deployment_def_from_import_path(path)
    assert inspect.isclass(found)
    assert inspect.iscoroutinefunction(found.check_health), "Serve holds an answer on the event loop"


def test_the_application_is_described_without_what_its_replicas_import() -> None:
    """Serve starts a process for it before any replica, at each start and redeployment."""
    code = """
import sys
from app.main import build
build({})
print([name for name in ("app.deployments.ingress.service", "app.engine.engine", "tokenizers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
