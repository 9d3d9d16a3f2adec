"""The Serve application: `serve run configs/serve.yaml` calls `build` with the file's `args`.

In: the settings of `app.config`. Out: an application of two deployments, wired once. How many replicas
there are and what each takes is Serve's to say (`deployments:` in the same file); the options here are
what the design needs.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.config import load_config
from app.deployments.ingress.deployment import Ingress
from app.deployments.placement.replica_choice import make_policy
from app.deployments.replica.deployment import EngineReplica

#: Calls a replica may have open at once: readers and short admissions. The engine's queue is the real limit.
MAX_ENGINE_CALLS = 1000
#: HTTP requests an ingress may have open at once, waiting ones included.
MAX_INGRESS_CALLS = 2000
#: Shares of Ray's count of CPUs, which bound how many replicas start on a machine and nothing else: one engine and one
#: ingress fit on each core, two of each on two.
ENGINE_CPUS, INGRESS_CPUS = 0.9, 0.1
#: How long an engine replica that is being replaced may finish its streams; what it does not finish goes on elsewhere.
DRAIN_TIMEOUT_S = 120.0
#: An ingress that is being replaced may finish whatever it has accepted: nobody else holds its connections. It may
#: last this much longer than the longest request.
INGRESS_DRAIN_MARGIN_S = 30.0


def build(args: dict[str, Any]) -> Application:
    """Check the settings and describe the application. Raises ConfigError."""
    config = load_config(args)
    make_policy(config.placement)
    config_json = config.model_dump_json()
    engine = serve.deployment(
        name="EngineReplica",
        num_replicas=1,
        max_ongoing_requests=MAX_ENGINE_CALLS,
        health_check_period_s=2.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        ray_actor_options={"num_cpus": ENGINE_CPUS},
        request_router_config=RequestRouterConfig(
            request_router_class="app.deployments.rpc.targeted_router:TargetedRouter",  # type: ignore[arg-type]
        ),
    )(EngineReplica)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=MAX_INGRESS_CALLS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=config.limits.request_timeout_s + INGRESS_DRAIN_MARGIN_S,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
    )(Ingress)
    return ingress.bind(config_json, engine.bind(config_json))
