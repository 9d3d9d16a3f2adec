"""A Ray cluster of several nodes on this machine, with our application on it; run by `conftest`.

`python -m tests.e2e.cluster.operate FILE NUM_NODES` prints one line of JSON when the application of the Serve file
runs: the process ids of the GCS and of every node's raylet, the head first. Each line that it reads is something to do
(`Operated.do`), and is answered with the process ids as they are then; it waits until its input ends.
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
from ray._private.node import Node
from ray.cluster_utils import Cluster
from ray.serve.schema import ServeDeploySchema

from app.config import load_config
from app.deployments.rpc import ray_private
from app.deployments.rpc.named_actor import NamedActor
from app.deployments.rpc.uds_transport import FOLDER_VARIABLE
from app.deployments.store.actor import AdapterStoreActor, store_name, store_settings
from load_tests.service import free_port
from tests.e2e.cluster.readers import TwoReaders

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


def _connect(cluster: Cluster) -> None:
    ray.init(address=cluster.address, namespace="tests", log_to_driver=False, logging_level="ERROR")


def main() -> None:
    path, num_nodes = sys.argv[1:]
    head = {**_node(0), "include_dashboard": False, "gcs_server_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.head_node, *(cluster.add_node(wait=False, **_node(place)) for place in range(1, int(num_nodes)))]
    cluster.wait_for_nodes(120)
    _connect(cluster)
    document = yaml.safe_load(Path(path).read_text())
    _start_store(document)
    schema = ServeDeploySchema.model_validate(document)
    ray_private.deploy(ray_private.start_serve(schema, wait_for_proxies=False), schema)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (application := serve.status().applications.get("polylora")) is None or application.status != "RUNNING":
        if time.monotonic() > deadline_s or (application is not None and application.status == "DEPLOY_FAILED"):
            sys.exit(f"the application does not run: {application}")
        time.sleep(0.5)
    settings = document["applications"][0]["args"]
    operated = Operated(cluster, nodes, head, settings)
    operated.tell()
    for line in sys.stdin:
        operated.do(line.strip())


class Operated:
    """What happens to machines: the GCS, or the head with all that runs there, dies and is started again; another takes
    the place of a dead one; two processes of one node read an adapter."""

    def __init__(self, cluster: Cluster, nodes: list[Node], head: dict[str, Any], settings: dict[str, Any]) -> None:
        ray.shutdown()  # a process that is connected through a node ends with it
        self._settings = settings
        self._readers: TwoReaders | None = None
        self._cluster = cluster
        self._nodes = nodes
        self._head = head

    def tell(self, **more: Any) -> None:
        """The process ids, and what else there is to say, as one line."""
        raylets = [node.all_processes["raylet"][0].process.pid for node in self._nodes]
        gcs = [item.process.pid for item in self._nodes[0].all_processes.get("gcs_server", [])]
        print(json.dumps({"gcs": gcs, "raylets": raylets, **more}), flush=True)

    def do(self, what: str) -> None:
        if what.startswith("ask "):
            _, place, name = what.split()
            _connect(self._cluster)
            self._readers = TwoReaders(self._nodes[int(place)].node_id, self._settings, name)
        elif what == "read":
            assert self._readers is not None
            places = self._readers.read()
            ray.shutdown()
            return self.tell(places=places)
        elif what == "kill gcs":
            self._nodes[0].kill_gcs_server(check_alive=False)
        elif what == "start gcs":
            self._nodes[0].start_gcs_server()
        elif what == "kill head":
            self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)
        elif what == "start head":
            self._nodes.insert(0, self._cluster.add_node(**self._head))
        elif what.startswith("replace "):  # a node whose processes are dead
            place = int(what.split()[1])
            self._cluster.remove_node(self._nodes[place], allow_graceful=False)
            self._nodes[place] = self._cluster.add_node(wait=False, **_node(place))
        else:
            raise ValueError(what)
        return self.tell()


if __name__ == "__main__":
    main()
