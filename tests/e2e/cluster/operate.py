"""A Ray cluster of several nodes on this machine, with our application on it; run by `conftest`.

`python -m tests.e2e.cluster.operate FILE NUM_NODES` prints one line of JSON when the application of the Serve file
runs: the process ids of the GCS and of every node's raylet, the head first. It waits until its input ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import ServeDeploySchema

from app.config import load_config
from app.deployments.links import ray_private
from app.deployments.links.ray_calls import NamedActor
from app.deployments.links.sockets import FOLDER_VARIABLE
from app.deployments.store.actor import AdapterStoreActor, store_name, store_settings

START_TIMEOUT_S = 300.0


#: What every node but the head has: the store lives on one of them.
BESIDE_THE_HEAD = "beside_the_head"


def _node(place: int) -> dict[str, Any]:
    """Sockets of its own, as on a machine of its own: frames to other nodes go through Ray."""
    sockets = Path(os.environ["RAY_TMPDIR"]) / f"s{place}"
    resources = {BESIDE_THE_HEAD: 1} if place else {}
    environment = {FOLDER_VARIABLE: str(sockets)}
    return {"num_cpus": 1, "object_store_memory": 128 << 20, "env_vars": environment, "resources": resources}


def _start_store(document: dict[str, Any]) -> None:
    """The service's own store, made before the service asks for it and bound to the nodes beside the head."""
    config = load_config(document["applications"][0]["args"])
    arguments = (store_settings(config), config.logs.model_dump_json())
    actor = NamedActor(store_name(config), AdapterStoreActor, *arguments, resources={BESIDE_THE_HEAD: 0.001})
    ray.get(actor.start())


def main() -> None:
    path, num_nodes = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={**_node(0), "include_dashboard": False})
    nodes = [cluster.head_node, *(cluster.add_node(wait=False, **_node(place)) for place in range(1, int(num_nodes)))]
    cluster.wait_for_nodes(120)
    ray.init(address=cluster.address, namespace="tests", log_to_driver=False, logging_level="ERROR")
    document = yaml.safe_load(Path(path).read_text())
    _start_store(document)
    schema = ServeDeploySchema.model_validate(document)
    ray_private.deploy(ray_private.start_serve(schema, wait_for_proxies=False), schema)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (application := serve.status().applications.get("polylora")) is None or application.status != "RUNNING":
        if time.monotonic() > deadline_s or (application is not None and application.status == "DEPLOY_FAILED"):
            sys.exit(f"the application does not run: {application}")
        time.sleep(0.5)
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    print(json.dumps({"gcs": gcs, "raylets": raylets}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
