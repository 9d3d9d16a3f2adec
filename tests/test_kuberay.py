"""The file for Kubernetes says what the service and Ray understand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli.config_file import settings_of
from app.cli.ray_env import HA_PROXY_SCRIPT, HA_PROXY_SWITCHES, RAY_SWITCHES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported: pydantic's deprecations
    from ray.serve.schema import ServeDeploySchema

    from app.deployments.rpc.ray_private import READ_VERSION
    from app.main import INGRESS_DRAIN_MARGIN_S, build

PATH = Path(__file__).parents[1] / "configs" / "kuberay.yaml"


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(PATH.read_text())
    return document


@pytest.fixture(scope="module")
def serve_config(service: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return document


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_it_is_a_ray_service_of_our_version(service: dict[str, Any]) -> None:
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == READ_VERSION


def test_ray_and_the_service_accept_its_applications(serve_config: dict[str, Any]) -> None:
    schema = ServeDeploySchema.model_validate(serve_config)
    settings = settings_of(serve_config, PATH)
    assert settings.http.management == "token"
    assert schema.http_options.host == "0.0.0.0"
    (application,) = schema.applications
    built = build(application.args)
    assert {deployment.name for deployment in application.deployments} == {"Ingress", "EngineReplica"}
    assert built._bound_deployment.name == "Ingress"


def test_every_pod_has_the_switches_and_the_secrets(service: dict[str, Any]) -> None:
    switches = {name: value for name, value, _ in RAY_SWITCHES + HA_PROXY_SWITCHES}
    switches["RAY_SERVE_HAPROXY_BINARY_PATH"] = HA_PROXY_SCRIPT
    for pod in pods(service):
        (container,) = pod["containers"]
        entries = {entry["name"]: entry for entry in container["env"]}
        assert switches == {name: entries[name].get("value") for name in switches}
        for secret in ("POLYLORA_REGISTRY_URL", "POLYLORA_MANAGEMENT_TOKEN"):
            assert "secretKeyRef" in entries[secret]["valueFrom"], f"{secret} is no plain text"


def test_a_pod_lives_for_as_long_as_its_requests_may(service: dict[str, Any], serve_config: dict[str, Any]) -> None:
    drain_s = settings_of(serve_config, PATH).limits.request_timeout_s + INGRESS_DRAIN_MARGIN_S
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= drain_s
    for pod in pods(service)[1:]:
        assert pod["terminationGracePeriodSeconds"] > drain_s
        (container,) = pod["containers"]
        (hook,) = [" ".join(container["lifecycle"]["preStop"]["exec"]["command"])]
        assert f"--deadline-remaining-seconds {drain_s:.0f}" in hook
        assert container["readinessProbe"]["httpGet"]["port"] == serve_config["http_options"]["port"]
