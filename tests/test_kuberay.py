"""The file for Kubernetes says what the service and Ray understand."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli.config_file import settings_of
from app.cli.ray_env import HA_PROXY_SCRIPT, HA_PROXY_SWITCHES, HARD_STOP, RAY_SWITCHES
from app.config import INGRESS_DRAIN_MARGIN_S

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported: pydantic's deprecations
    import ray.serve as serve_module
    from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    from ray.serve.schema import ServeDeploySchema

    from app.deployments.rpc.ray_private import READ_VERSION
    from app.main import build

PATH = Path(__file__).parents[1] / "configs" / "kuberay.yaml"


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    document, _ = yaml.safe_load_all(PATH.read_text())
    assert isinstance(document, dict)
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
    (environment,) = re.findall(r"RUN python3 -m venv (\S+)", (PATH.parents[1] / "Dockerfile").read_text())
    switches["RAY_SERVE_HAPROXY_BINARY_PATH"] = f"{environment}/bin/{HA_PROXY_SCRIPT}"  # Ray takes a whole path only
    for pod in pods(service):
        (container,) = pod["containers"]
        entries = {entry["name"]: entry for entry in container["env"]}
        assert switches == {name: entries[name].get("value") for name in switches}
        for secret in ("POLYLORA_REGISTRY_URL", "POLYLORA_MANAGEMENT_TOKEN", "POLYLORA_ADMIN_KEY_SHA256"):
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
        (hard_stop,) = [entry["value"] for entry in container["env"] if entry["name"] == HARD_STOP]
        assert int(hard_stop) >= drain_s, "a HAProxy that was replaced finishes its answers"


def test_ray_asks_for_its_token(service: dict[str, Any]) -> None:
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_probes_need_no_program_in_the_image(service: dict[str, Any]) -> None:
    for pod in pods(service):
        (container,) = pod["containers"]
        assert {"httpGet"} == {kind for probe in probes(container) for kind in probe if kind in ("httpGet", "exec")}
    head, worker = pods(service)
    assert [probe["httpGet"]["path"] for probe in probes(head["containers"][0])] == ["/api/gcs_healthz"] * 2
    ray = Path(serve_module.__file__).parents[1]
    for path in ("/api/gcs_healthz", "/api/local_raylet_healthz"):  # answered without the token
        assert f'"{path}"' in (ray / "dashboard" / "http_server_head.py").read_text(), path
    assert '"/api/local_raylet_healthz"' in (ray / "dashboard" / "http_server_agent.py").read_text()
    assert worker["containers"][0]["livenessProbe"]["httpGet"]["port"] == DEFAULT_DASHBOARD_AGENT_LISTEN_PORT


def probes(container: dict[str, Any]) -> list[dict[str, Any]]:
    return [container["readinessProbe"], container["livenessProbe"]]


def test_only_the_service_s_own_port_is_open_to_everyone(service: dict[str, Any], serve_config: dict[str, Any]) -> None:
    _, policy = yaml.safe_load_all(PATH.read_text())
    assert policy["kind"] == "NetworkPolicy"
    label = policy["spec"]["podSelector"]["matchLabels"]
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"] == label, "the policy is for every pod"
    to_everyone = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert to_everyone == [[{"port": serve_config["http_options"]["port"]}]]


def test_kubernetes_can_tell_that_the_images_user_is_not_root(service: dict[str, Any]) -> None:
    """It refuses to start an image whose user is a name, where `runAsNonRoot` is set."""
    dockerfile = (PATH.parents[1] / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (.+)$", dockerfile, re.MULTILINE)
    for pod in pods(service):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert int(user) == pod["securityContext"]["fsGroup"] > 0


def test_the_image_has_the_clients_of_what_the_manifest_names(service: dict[str, Any]) -> None:
    """The registry's database and the adapters' bucket."""
    (extras,) = re.findall(r"--build-arg 'EXTRAS=\[(.+)\]'", PATH.read_text())
    assert extras.split(",") == ["postgres", "s3"]
    assert service["spec"]["serveConfigV2"].count("s3://") == 1
    assert "='postgresql://" in PATH.read_text()


def test_rays_object_store_fits_into_its_volume(service: dict[str, Any]) -> None:
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (size,) = [volume["emptyDir"]["sizeLimit"] for volume in pods(service)[1]["volumes"] if "medium" in str(volume)]
    assert 0 < int(group["rayStartParams"]["object-store-memory"]) < int(size.removesuffix("Gi")) << 30
