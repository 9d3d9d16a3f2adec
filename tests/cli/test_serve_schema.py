"""Serve's part of the settings file: what Serve would pass over in silence is an error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from app.cli.config_file import read_document
from app.engine.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported: pydantic's deprecations
    from app.cli.serve_schema import serve_schema
    from app.main import build

ROOT = Path(__file__).parents[2]
PATH = Path("serve.yaml")


def document(deployment: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    entry = {"name": "EngineReplica"} | (deployment or {})
    ours = {"name": "polylora", "import_path": "app.main:build", "args": {"any": 1}, "deployments": [entry]}
    return {"applications": [ours]} | top


@pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")  # Ray was imported without its switches
@pytest.mark.parametrize(
    "name",
    [
        *("serve.yaml", "serve-jax.yaml", "serve-autoscale.yaml", "serve-gemma.yaml"),
        *("serve-gpu.yaml", "serve-gpu-tp.yaml", "serve-two-bases.yaml"),
    ],
)
def test_the_files_that_are_shipped_are_known(name: str) -> None:
    schema = serve_schema(read_document(ROOT / "configs" / name), PATH)
    assert [application.name for application in schema.applications] == ["polylora"]


def test_options_of_every_kind_are_known() -> None:
    options = {
        "num_replicas": "auto",
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 2, "policy": {"policy_function": "math:ceil"}},
        "ray_actor_options": {"num_cpus": 0.5},
        "max_replicas_per_node": 1,
        "user_config": {"max_sequences": 4},
        "graceful_shutdown_timeout_s": 5,
    }
    serve_schema(document(options, http_options={"host": "::", "keep_alive_timeout_s": 5}), PATH)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            document({"num_replica": 5}),
            r"deployments\[EngineReplica\].num_replica is an unknown key; did you mean",
        ),
        (document({"ray_actor_options": {"num_cpu": 1}}), r"num_cpu is an unknown key; did you mean 'num_cpus'"),
        (document({"autoscaling_config": {"max_replica": 1}}), r"autoscaling_config.max_replica is an unknown key"),
        (document(application=[]), r"^serve.yaml: application is an unknown key; did you mean 'applications'"),
        (document(http_options={"prot": 1}), r"http_options.prot is an unknown key; did you mean 'port'"),
        (document({"name": "Engine"}), r"there is no 'Engine', only EngineReplica and Ingress"),
        (document({"name": "EngineReplica-2"}), r"there is no 'EngineReplica-2', only EngineReplica and Ingress"),
        (document({"num_replicas": "auto"}), r"counts open calls and not work; add policy: .*AdapterDemand"),
        (document({"autoscaling_config": {"max_replicas": 4}}), r"counts open calls and not work; add policy"),
        (
            document(
                {"autoscaling_config": {"min_replicas": 0, "max_replicas": 2, "policy": {"policy_function": "a:b"}}}
            ),
            r"would not be ready then; set http.ready_at_zero_replicas",
        ),
        (document({"num_replicas": "many"}), r"num_replicas.*auto"),
        (document({"max_ongoing_requests": 0}), r"max_ongoing_requests: .*greater than 0"),
    ],
)
def test_what_serve_does_not_know_is_named(content: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        serve_schema(content, PATH)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_bases", [1, 3])
def test_the_deployments_are_those_that_are_built(num_bases: int) -> None:
    args = {"bases": [{"model": {"uri": f"m{index}", "name": f"m{index}"}} for index in range(num_bases)]}
    built = build(args)._bound_deployment
    names = [built.name, *(engine._bound_deployment.name for engine in built.init_args[1])]
    assert len(set(names)) == num_bases + 1
    ours = {"name": "polylora", "import_path": "app.main:build", "args": args}
    serve_schema({"applications": [ours | {"deployments": [{"name": name} for name in names]}]}, PATH)
    with pytest.raises(ConfigError, match=f"'EngineReplica-{num_bases + 1}'"):
        serve_schema({"applications": [ours | {"deployments": [{"name": f"EngineReplica-{num_bases + 1}"}]}]}, PATH)
