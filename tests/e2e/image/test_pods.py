"""configs/kuberay.yaml as KubeRay's operator runs it, without Kubernetes: a head and workers, each in its own network.

The commands and variables that the operator adds are those of KubeRay 1.7 (ray-operator/controllers/ray/common/pod.go)
without its shorter timeouts, and with the head's address in place of its name. Other than in the manifest, the base is
the tiny model, there is one replica, and pods have the kernels that the demo's container has compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from load_tests.service import ROOT
from tests.e2e.image.build import Image
from tests.e2e.image.conftest import give
from tests.e2e.image.containers import Answer, Container, project_key
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.postgres import PostgresServer, find_postgres
from tests.redis_server import find_redis

HEAD_IP, REDIS_IP = "10.77.0.1", "10.77.0.4"
MODEL = "smollm2-135m-instruct"
#: Where PostgreSQL's socket is in the pods, and its name on any machine.
SOCKET_FOLDER, SOCKET = "/run/postgresql", ".s.PGSQL.5432"
GIB = 1 << 30


@dataclass
class Pods:
    """The pods of the service, by their addresses."""

    image: Image
    manifest: dict[str, Any]
    folder: Path
    cache: Path
    secrets: Mapping[str, str]
    token: str
    mounts: dict[str, Path]
    running: ExitStack
    by_ip: dict[str, Container] = field(default_factory=dict)

    def start(self, ip: str) -> Container:
        """The head, if the address is the head's, otherwise a worker."""
        cluster = self.manifest["spec"]["rayClusterConfig"]
        is_head = ip == HEAD_IP
        group = cluster["headGroupSpec"] if is_head else cluster["workerGroupSpecs"][0]
        (spec,) = group["template"]["spec"]["containers"]
        parameters = {"dashboard-agent-listen-port": "52365"} | group["rayStartParams"]
        parameters.setdefault("num-cpus", spec["resources"]["limits"]["cpu"])
        parameters["memory"] = str(int(spec["resources"]["limits"]["memory"].removesuffix("Gi")) * GIB)
        if not is_head:
            parameters["address"] = f"{HEAD_IP}:6379"
        words = " ".join(f"--{name}={value}" for name, value in parameters.items())
        command = f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; ray start {'--head ' * is_head}{words} --block"
        environment = {
            **self._environment(spec),
            "RAY_AUTH_MODE": cluster["authOptions"]["mode"],
            "RAY_AUTH_TOKEN": self.token,
            "RAY_ADDRESS": "127.0.0.1:6379" if is_head else f"{HEAD_IP}:6379",
            "RAY_PORT": "6379",
        }
        if is_head:
            environment["RAY_REDIS_ADDRESS"] = cluster["gcsFaultToleranceOptions"]["redisAddress"]
            environment["RAY_external_storage_namespace"] = "polylora"
        folder = self.folder / ip
        mounts = self.mounts | {"/var/cache/polylora": self.cache}
        for mount in spec.get("volumeMounts", ()):
            if mount["mountPath"] != "/dev/shm":  # which every container has
                volume = folder / mount["name"]
                volume.mkdir(parents=True)
                os.chown(volume, 0, group["template"]["spec"]["securityContext"]["fsGroup"])
                volume.chmod(0o2775)
                mounts[mount["mountPath"]] = volume
        pod = Container(self.image, folder, environment, ["/bin/bash", "-c", "--", command], mounts, is_restricted=True)
        self.running.enter_context(pod)
        self.by_ip[ip] = pod
        return pod

    def probe(self, ip: str, name: str) -> Answer:
        """What the kubelet gets that asks for a pod's `livenessProbe` or `readinessProbe`."""
        probe = self._container(ip)[name]
        where = probe["httpGet"]
        url = f"http://{ip}:{where['port']}{where['path']}"
        return self.by_ip[HEAD_IP].request(url, timeout_s=probe["timeoutSeconds"])

    def wait_until_ready(self, ip: str) -> None:
        self.by_ip[ip].wait(lambda: self.probe(ip, "readinessProbe").status == 200, f"readiness of {ip}", 900)

    def pre_stop(self, ip: str) -> list[str]:
        command: list[str] = self._container(ip)["lifecycle"]["preStop"]["exec"]["command"]
        return command

    def deploy(self) -> Answer:
        """Send `serveConfigV2` as the operator does."""
        document = yaml.safe_load(self.manifest["spec"]["serveConfigV2"])
        (application,) = document["applications"]
        application["args"]["model"]["uri"] = "/srv/model"
        application["args"]["adapters"]["roots"] = ["/srv/loras"]
        for deployment in application["deployments"]:
            deployment["num_replicas"] = 1
        return self.by_ip[HEAD_IP].request(
            f"http://{HEAD_IP}:8265/api/serve/applications/", document,
            {"x-ray-authorization": f"Bearer {self.token}"}, "PUT",
        )  # fmt: skip

    def is_running(self) -> bool:
        """What the operator waits for before it sends traffic to a cluster: all applications run."""
        url = f"http://{HEAD_IP}:8265/api/serve/applications/?api_type=declarative"
        answer = self.by_ip[HEAD_IP].request(url, headers={"x-ray-authorization": f"Bearer {self.token}"})
        found = json.loads(answer.text)["applications"].values() if answer.status == 200 else ()
        return [application["status"] for application in found] == ["RUNNING"]

    def _container(self, ip: str) -> dict[str, Any]:
        cluster = self.manifest["spec"]["rayClusterConfig"]
        group = cluster["headGroupSpec"] if ip == HEAD_IP else cluster["workerGroupSpecs"][0]
        (spec,) = group["template"]["spec"]["containers"]
        found: dict[str, Any] = spec
        return found

    def _environment(self, spec: Mapping[str, Any]) -> dict[str, str]:
        """A container's `env`; a value that is optional and in no secret is left out."""
        found = {}
        for entry in spec["env"]:
            if "value" in entry:
                found[entry["name"]] = entry["value"]
                continue
            reference = entry["valueFrom"]["secretKeyRef"]
            if reference["key"] in self.secrets or not reference.get("optional"):
                found[entry["name"]] = self.secrets[reference["key"]]
        return found


@pytest.fixture
def pods(image: Image, cache: Path, tmp_path: Path) -> Iterator[tuple[Pods, str]]:
    """A head with its network and Redis, and the admin key whose SHA-256 is in the secret."""
    programs, redis = find_postgres(), find_redis()
    if programs is None or redis is None:
        pytest.skip("postgresql or redis-server is not installed: the manifest's service needs both")
    manifest, _ = yaml.safe_load_all((ROOT / "configs" / "kuberay.yaml").read_text(encoding="utf-8"))
    save_tiny_model(tmp_path / "model")
    save_adapter(tmp_path / "loras" / "r8", rank=8, seed=0)
    for folder in ("model", "loras"):
        give(tmp_path / folder, image)
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{REDIS_IP} redis\n")
    admin_key = secrets.token_hex(32)
    with ExitStack() as running:
        database = PostgresServer(programs)
        running.callback(database.stop)
        url, _, socket_folder = database.new_database().partition("?host=")
        values = {
            "registry-url": f"{url}?host={SOCKET_FOLDER}",
            "admin-key-sha256": hashlib.sha256(admin_key.encode()).hexdigest(),
            "management-token": secrets.token_hex(32),
        }
        mounts = {
            "/etc/hosts": tmp_path / "hosts",
            "/srv/model": tmp_path / "model",
            "/srv/loras": tmp_path / "loras",
            f"{SOCKET_FOLDER}/{SOCKET}": Path(socket_folder) / SOCKET,
        }
        found = Pods(image, manifest, tmp_path, cache, values, secrets.token_hex(32), mounts, running)
        head = found.start(HEAD_IP)
        _ip(head.process.pid, "link add bridge type bridge", f"addr add {HEAD_IP}/24 dev bridge", "link set bridge up")
        _ip(head.process.pid, "route add default dev bridge")
        options = ["--protected-mode", "no", "--save", "", "--dir", str(tmp_path)]
        server = subprocess.Popen(["unshare", "--net", redis, *options], stdout=subprocess.DEVNULL)
        running.callback(server.wait, 60)
        running.callback(server.kill)
        _link(head, server.pid, REDIS_IP)
        head.start()
        yield found, admin_key


def test_the_service_answers_who_has_a_key_and_moves_before_a_pod_ends(pods: tuple[Pods, str]) -> None:
    service, admin_key = pods
    first, second = "10.77.0.2", "10.77.0.3"
    service.wait_until_ready(HEAD_IP)
    _join(service, first)
    assert service.probe(first, "readinessProbe").status != 200, "ready before there is an application"
    url = f"http://{HEAD_IP}:8265/api/serve/applications/"
    assert service.by_ip[HEAD_IP].request(url).status == 401, "Ray's token is asked for"
    assert (deployed := service.deploy()).status == 200, deployed.text
    service.wait_until_ready(first)
    service.by_ip[first].wait(service.is_running, "application that runs", 900)
    assert "instead of /dev/shm" not in service.by_ip[first].log.read_text(), (
        "Ray says so if its object store is elsewhere"
    )
    key = project_key(service.by_ip[first], admin_key)

    def ask(ip: str, headers: Mapping[str, str]) -> Answer:
        body = {"model": MODEL, "prompt": "the quick brown", "max_tokens": 8, "temperature": 0}
        return service.by_ip[HEAD_IP].request(f"http://{ip}:8000/v1/completions", body, headers)

    assert ask(first, {}).status == 401
    assert ask(first, {"Authorization": f"Bearer {admin_key}"}).status == 403
    answer = ask(first, {"Authorization": f"Bearer {key}"})
    assert answer.status == 200, answer.text
    for ip in (HEAD_IP, first):
        assert service.probe(ip, "livenessProbe").status == 200

    _join(service, second)
    drained = service.by_ip[first].run(*service.pre_stop(first), timeout_s=600)
    assert drained.returncode == 0, drained
    service.wait_until_ready(second)
    service.by_ip[second].wait(service.is_running, "application that runs again", 300)
    moved = ask(second, {"Authorization": f"Bearer {key}"})
    assert moved.status == 200, moved.text
    assert _text(moved) == _text(answer)


def _join(service: Pods, ip: str) -> None:
    """Start a worker whose network is the head's."""
    worker = service.start(ip)
    _link(service.by_ip[HEAD_IP], worker.process.pid, ip)
    worker.start()
    worker.wait(lambda: service.probe(ip, "livenessProbe").status == 200, f"life of {ip}", 300)


def _link(head: Container, pid: int, ip: str) -> None:
    """Give a process's network an address that the head's reaches, and a route to the others."""
    name = f"pod{ip.rpartition('.')[2]}"
    _ip(head.process.pid, f"link add {name} type veth peer name eth0 netns {pid}")
    _ip(head.process.pid, f"link set {name} master bridge", f"link set {name} up")
    _ip(pid, f"addr add {ip}/24 dev eth0", "link set eth0 up", f"route add default via {HEAD_IP}")


def _ip(pid: int, *commands: str) -> None:
    """Run commands of `ip` in a process's network, once that is not this one's any more."""
    deadline_s = time.monotonic() + 60
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < deadline_s, f"process {pid} has no network of its own"
        time.sleep(0.1)
    for command in commands:
        subprocess.run(["nsenter", f"--target={pid}", "--net", "ip", *command.split()], check=True, timeout=60)


def _text(answer: Answer) -> str:
    text: str = json.loads(answer.text)["choices"][0]["text"]
    return text
