"""The Serve application: `serve run configs/serve.yaml` calls `build` with the file's `args`.

It has two deployments, and one more for each further base model. Their numbers of replicas and resources belong to
Serve (`deployments:` in the same file); the options here are what the design requires.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.base_models import ENGINE_DEPLOYMENT, engine_deployment, load_bases
from app.config import INGRESS_DRAIN_MARGIN_S
from app.deployments.placement.replica_choice import make_policy
from app.deployments.rpc.health_check import HEALTH_CHECK_PERIOD_S
from app.deployments.rpc.ray_private import check_ray_token

#: Replicas import their classes; the process that only describes them would need a second for it. Serve takes paths,
#: too, which its types do not say.
ENGINE_CLASS: Any = "app.deployments.replica.deployment.EngineReplica"
INGRESS_CLASS: Any = "app.deployments.ingress.deployment.Ingress"
#: Open calls per replica: readers and short admissions. The engine's queue is the real limit.
MAX_ENGINE_CALLS = 1000
#: Open HTTP requests per ingress, including waiting ones.
MAX_INGRESS_CALLS = 2000
#: Fractions of Ray's CPU count. They only bound how many replicas start on a machine: one engine and two ingresses per
#: core.
ENGINE_CPUS, INGRESS_CPUS = 0.9, 0.05
#: HAProxy sends the requests of a lost ingress to the other one.
NUM_INGRESSES = 2
#: How long a draining engine replica may finish its streams; unfinished ones move to other replicas.
DRAIN_TIMEOUT_S = 120.0


def build(args: dict[str, Any]) -> Application:
    """Check the settings and describe the application. Raises ConfigError."""
    configs = load_bases(args)
    config = configs[0]
    if config.http.require_ray_token:
        check_ray_token()
    for each in configs:
        make_policy(each.placement)
    config_jsons = [each.model_dump_json() for each in configs]
    engine = serve.deployment(
        name=ENGINE_DEPLOYMENT,
        num_replicas=1,
        max_ongoing_requests=MAX_ENGINE_CALLS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        ray_actor_options={"num_cpus": ENGINE_CPUS},
        request_router_config=RequestRouterConfig(
            request_router_class="app.deployments.rpc.targeted_router:TargetedRouter",  # type: ignore[arg-type]
        ),
    )(ENGINE_CLASS)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=NUM_INGRESSES,
        max_ongoing_requests=MAX_INGRESS_CALLS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=config.limits.request_timeout_s + INGRESS_DRAIN_MARGIN_S,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
    )(INGRESS_CLASS)
    engines = [
        engine.options(name=engine_deployment(index)).bind(config_json)
        for index, config_json in enumerate(config_jsons)
    ]
    return ingress.bind(config_jsons, engines)
