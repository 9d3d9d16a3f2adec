"""The application as Serve is told of it."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported: pydantic's deprecations
    from app.main import INGRESS_DRAIN_MARGIN_S, build


@pytest.mark.parametrize("request_timeout_s", [600.0, 7200.0])
def test_an_ingress_drains_for_as_long_as_a_request_may_last(request_timeout_s: float) -> None:
    ingress = build({"limits": {"request_timeout_s": request_timeout_s}})._bound_deployment
    options = ingress._deployment_config
    assert (ingress.name, options.graceful_shutdown_timeout_s) == (
        "Ingress",
        request_timeout_s + INGRESS_DRAIN_MARGIN_S,
    )
