"""`polylora status` and `polylora doctor`: what they say of a service and of a machine."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli import doctor
from app.cli import status as status_command
from app.cli.config_file import read_settings
from app.cli.doctor import adapter_lines, limit_line, memory_lines
from app.cli.main import main
from app.cli.ray_env import ONE_MACHINE_SWITCHES
from app.cli.status import ray_lines, status_lines
from app.config import AppConfig
from app.engine.adapters.formats.reading import read_adapter
from app.engine.errors import ConfigError, PolyloraError
from app.engine.models.linear_modules import DENSE_TARGETS
from app.engine.models.spec import EncoderSpec, LayerSpec, MlpSpec
from app.kernels.bf16_matmul import self_test as bf16_self_test
from app.kernels.int8_matmul import self_test as int8_self_test
from load_tests.service import free_port
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, tiny_spec, write_peft
from tests.fakes import fake_spec

ROOT = Path(__file__).parents[2]

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "model": "base",
    "is_ready": True,
    "num_adapters": 3,
    "num_open_requests": 1,
    "replicas": [
        {
            "replica_id": "abc",
            "engine": "vllm 0.32.0",
            "num_running": 2,
            "num_waiting": 1,
            "num_blocks": 100,
            "num_blocks_free": 90,
            "num_rank_rows_free": 500,
            "residents": 3,
            "memory_bytes": 3 << 20,
        }
    ],
    "tiers": {"host": {"held_adapters": 3, "held_bytes": 1 << 20, "hits": 7}, "disk": {}},
    "failures": [{"created": 0.0, "event": "failed to read", "name": "sql", "detail": None}],
}


class State(Enum):
    """Of a replica, as Serve has it."""

    STARTING = "STARTING"


def test_a_status_has_a_line_a_replica_a_tier_and_a_failure() -> None:
    lines = [" ".join(line.split()) for line in status_lines(STATUS, "http://x")]
    assert lines[0] == "http://x: ready"
    assert "abc vllm 0.32.0 2 1 10 of 100 500 3 3 MiB" in lines
    assert "host 3 1.0 7 0 0" in lines
    assert "disk 0 0.0 0 0 0" in lines
    assert lines[-1] == "1970-01-01T00:00:00Z failed to read sql"
    quiet = status_lines(STATUS | {"failures": [], "is_ready": False}, "http://x")
    assert quiet[-1] == "no recent failures"
    assert "not ready" in quiet[0]


def test_a_status_has_the_last_decision_of_the_autoscaler() -> None:
    decision = {"deployment": "EngineReplica", "created": 60, "prev_num_replicas": 1, "target_num_replicas": 3,
                "reason": "pending tokens", "needed_replicas": 2.9}  # fmt: skip
    old = decision | {"reason": "KV blocks in use"}
    text = "\n".join(status_lines(STATUS | {"scaling_decisions": [decision, old]}, "http://x"))
    assert "decision: 1970-01-01T00:01:00Z  EngineReplica 1 -> 3: pending tokens need 2.90\n" in text
    assert "KV blocks in use" not in text
    for nothing in ([], None):
        assert "decision" not in "".join(status_lines(STATUS | {"scaling_decisions": nothing}, "http://x"))


def test_a_failure_is_one_line_whatever_it_is_about() -> None:
    failure = {"created": 0, "event": "failed to read", "name": "sql", "detail": "no\nno recent failures\x1b[2J"}
    assert status_lines(STATUS | {"failures": [failure]}, "http://x")[-1].endswith(
        r"sql  no\nno recent failures\x1b[2J"
    )


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A service that answers one status; its URL, and the paths that were asked."""
    paths: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            body = json.dumps(STATUS).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answer) as http:
        thread = Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", paths
        http.shutdown()
        thread.join()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_url_with_v1_is_the_same_service(
    server: tuple[str, list[str]], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, paths = server
    assert main(["status", "--url", url + end]) == 0
    assert paths == ["/v1/status"]
    assert "ready" in capsys.readouterr().out


def test_a_service_that_does_not_answer_is_asked_for_through_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    deployment = SimpleNamespace(
        status=SimpleNamespace(value="UPDATING"),
        replica_states={State.STARTING: 1, "RUNNING": 2},  # members as Serve's type says, names as Ray brings them
        message="it waits",
    )
    application = SimpleNamespace(
        status=SimpleNamespace(value="DEPLOYING"), message="", deployments={"Ingress": deployment}
    )
    monkeypatch.setattr(status_command, "_applications", lambda: {"polylora": application})
    assert main(["status", "--url", url]) == 1
    said = capsys.readouterr().out
    assert f"no answer from {url}" in said
    assert "application polylora: DEPLOYING\n  Ingress: UPDATING, 1 STARTING, 2 RUNNING\n    it waits" in said
    assert ray_lines({}) == ["Serve has no applications"]

    def none() -> Any:
        raise PolyloraError("no Ray cluster here can be asked (x); is the service running?")

    monkeypatch.setattr(status_command, "_applications", none)
    assert main(["status", "--url", url]) == 1
    assert "is the service running?" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_ray_is_asked_where_a_service_of_this_machine_started_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would replace 127.0.0.1 by the machine's address, where `polylora serve` lets nothing of Ray listen."""
    asked: list[dict[str, str]] = []
    (switch, value, _), *_ = ONE_MACHINE_SWITCHES
    serve = SimpleNamespace(status=lambda: SimpleNamespace(applications={}))
    ray = SimpleNamespace(init=lambda *_, **__: asked.append(dict(os.environ)), shutdown=lambda: None, serve=serve)
    monkeypatch.setitem(sys.modules, "ray", ray)
    for name in (switch, "RAY_TMPDIR", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert status_command._applications() == {}
    (environment,) = asked
    assert environment.get(switch) == (None if address else value)
    assert environment["RAY_TMPDIR"]


def test_what_an_engine_takes_of_memory() -> None:
    spec, settings = fake_spec(), AppConfig.model_validate({"engine": {"num_kv_blocks": 64, "lora_pool_rows": 32}})
    large = AppConfig.model_validate({"engine": {"num_kv_blocks": 1 << 22}})  # 2 GiB, taken as they are used
    lines = memory_lines(spec, settings, 10 << 30)
    assert lines[-1] == f"10.00 GiB of memory are available: room for {(10 << 30) // _total(lines)} such engines"
    assert any("num_kv_blocks 64, 1024 tokens at a time" in line for line in lines)
    assert any("rank rows: engine.lora_pool_rows 32" in line for line in lines)
    experts = AppConfig.model_validate({"engine": {"num_kv_blocks": 64, "extra_weights_bytes": 9 << 30}})
    assert "9.00 GiB  experts' rows, " in "\n".join(memory_lines(spec, experts, 10 << 30))
    assert limit_line(spec, experts, 9 << 30) is not None
    assert "room for 0" in memory_lines(spec, experts, 9 << 30)[-2]
    narrow = AppConfig.model_validate({"engine": {"cpu": {"kv_cache_dtype": "bfloat16"}, "num_kv_blocks": 1 << 22}})
    sizes = [_kv_gib(memory_lines(spec, each, 10 << 30)) for each in (large, narrow)]
    assert sizes == [2.0, 1.0]
    encoder = replace(spec, encoder=EncoderSpec(512, 0, 2))
    assert not any("KV cache" in line for line in memory_lines(encoder, settings, 10 << 30)), "an encoder has none"
    assert "lower engine.num_kv_blocks" in memory_lines(spec, large, 1 << 30)[-1]
    assert "room for 1 such engine" in memory_lines(spec, large, 4 << 30)[-1]
    with pytest.raises(ConfigError, match=r"(?s)room for 0 such engines\n +lower engine.num_kv_blocks"):
        memory_lines(spec, settings, 0)


def test_an_engine_that_may_exceed_the_container_s_limit_is_announced() -> None:
    settings = {"engine": {"num_kv_blocks": 64, "lora_pool_rows": 32}, "adapters": {"host_cache_bytes": 1 << 30}}
    spec, config = fake_spec(), AppConfig.model_validate(settings)
    needed = _total(memory_lines(spec, config, 10 << 30)) + (1 << 30)
    assert limit_line(spec, config, needed + (10 << 20)) is None
    assert limit_line(spec, config, None) is None
    said = limit_line(spec, config, needed - (100 << 20))
    assert said is not None
    assert f"take up to {needed / (1 << 30):.2f} GiB: the kernel would end the engine" in said
    assert f"the memory limit here is {(needed - (100 << 20)) / (1 << 30):.2f} GiB" in said
    elsewhere = AppConfig.model_validate(settings | {"engine": {"cuda": {}}})
    assert limit_line(spec, elsewhere, 1 << 20) is None, "only the CPU engine's memory is computed"


@pytest.mark.parametrize("targets", [DENSE_TARGETS, ("q_proj", "v_proj")])
def test_how_many_adapters_there_is_room_for(tmp_path: Path, targets: tuple[str, ...]) -> None:
    spec = tiny_spec()
    write_peft(tmp_path, peft_config(16, targets), peft_tensors(random_arrays(spec, 16, targets)))
    size_bytes = read_adapter(tmp_path, spec).card.size_bytes // 2  # in bfloat16
    engine = {"lora_pool_rows": 1024, "max_loras": 256}
    adapters = {"host_cache_bytes": 100 * size_bytes + (1 << 20)}
    settings = AppConfig.model_validate({"engine": engine, "adapters": adapters})
    on_device, on_host = adapter_lines(spec, settings)
    assert on_device.endswith("at least 64 at a time")
    number = settings.adapters.host_cache_bytes // size_bytes
    assert f"{number} {'saved in bfloat16 on all modules' if targets == DENSE_TARGETS else 'on queries'}" in on_host
    few = AppConfig.model_validate({"engine": engine | {"max_loras": 8}})
    assert adapter_lines(spec, few)[0].endswith("at least 7 at a time"), "one of the slots is the base's"
    small = AppConfig.model_validate({"engine": {"lora_pool_rows": 8}})
    assert adapter_lines(spec, small)[0].endswith("at least 0 at a time")


def test_the_default_service_holds_hundreds_on_the_device_and_thousands_on_the_host() -> None:
    fake = fake_spec()
    attention = replace(fake.layers[0].attention, num_heads=9, num_kv_heads=3, head_dim=64)
    spec = replace(fake, hidden_size=576, layers=(LayerSpec(attention, MlpSpec(1536)),) * 30)  # SmolLM2-135M
    settings = read_settings(ROOT / "configs" / "serve.yaml")
    on_device, on_host = adapter_lines(spec, settings)
    assert "at least 255 at a time" in on_device
    assert "2330 on queries and values alone" in on_host


def _kv_gib(lines: list[str]) -> float:
    return float(next(line for line in lines if "KV cache" in line).split()[0])


def _total(lines: list[str]) -> int:
    """What stands in the first line, in bytes, to two digits: enough where the process itself takes nearly all."""
    return round(float(lines[0].partition("up to ")[2].split()[0]) * (1 << 30))


def test_the_doctor_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("applications: [{import_path: 'app.main:build', args: {modle: {}}}]")
    assert main(["doctor", "--config", str(config)]) == 1
    said = capsys.readouterr().out
    assert "FAIL  settings: invalid service configuration; modle is an unknown key; did you mean 'model'?" in said
    assert "ok    disk: " in said
    assert "ok    sandbox: " in said


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"dtype": "float32", "tensor_parallel_size": 2}, ": about 0.00 GiB of weights and 6.00 GiB of adapter slots"),
        ({"quantization": "awq"}, ": about 6.00 GiB of adapter slots on each device"),
    ],
)
def test_the_doctor_says_what_vllm_takes(
    section: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "rank_row_bytes", lambda _, value_bytes: value_bytes << 20)
    sizes = {"python": "python", "max_loras": 96, "max_lora_rank": 32}
    settings = AppConfig.model_validate({"engine": {"vllm": {**sizes, **section}}})
    assert says in doctor._on_devices(fake_spec(), settings)
    assert doctor._on_devices(fake_spec(), AppConfig()) == ""


def test_the_doctor_says_which_form_multiplies_rounded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(compute: str) -> str:
        settings = AppConfig.model_validate({"engine": {"cpu": {"compute": compute}}})
        return doctor._checks(("127.0.0.1", 1), settings)["engine"]()

    monkeypatch.setattr(int8_self_test, "active_form", lambda: "avx2")
    monkeypatch.setattr(bf16_self_test, "active_form", lambda: "amx")
    assert engine("float32") == "engine.cpu is installed"
    assert engine("int8").startswith("engine.cpu is installed; it multiplies in int8 by its avx2 form")
    assert engine("bfloat16").startswith("engine.cpu is installed; it multiplies in bfloat16 by its amx form")
    monkeypatch.setattr(int8_self_test, "active_form", lambda: None)
    monkeypatch.setattr(bf16_self_test, "active_form", lambda: None)
    assert engine("float32") == "engine.cpu is installed"
    for compute in ("int8", "bfloat16"):
        with pytest.raises(ConfigError, match=f"compute is {compute}, .* set it to float32"):
            engine(compute)


def test_the_doctor_says_what_the_kernel_cannot_deny_adapters_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "confinement_gaps", list)
    assert doctor.sandbox_lines() == [
        "adapters are read, and their chat templates rendered, without network and other files"
    ]
    monkeypatch.setattr(doctor, "confinement_gaps", lambda: ["can read all", "can connect"])
    whose = "a process that reads adapters or renders their chat templates"
    assert doctor.sandbox_lines() == [f"{whose} can read all", f"{whose} can connect"]


def test_the_doctor_asks_about_the_address_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cache").write_text("a file in the way")
    monkeypatch.setenv("POLYLORA_CACHE", str(tmp_path / "cache"))
    config = tmp_path / "c.yaml"
    config.write_text("applications: [{import_path: 'app.main:build'}]")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        assert main(["doctor", "--config", str(config), "--port", str(port)]) == 1
    said = capsys.readouterr().out
    assert f"FAIL  port: cannot listen on 127.0.0.1:{port}" in said
    assert f"FAIL  model: cannot write to {tmp_path / 'cache'}" in said, "one that is in the way ends no other check"
    assert "ok    disk: " in said
    assert "ok    sandbox: " in said
    assert main(["doctor", "--config", str(config), "--port", "99999"]) == 1
    assert "FAIL  settings: port 99999 (--port, or http_options.port) is not" in capsys.readouterr().out


def test_the_doctor_says_what_this_machine_could_hold(
    demo_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "available_bytes", lambda: 8 << 30)
    args = {"model": {"uri": str(demo_gguf)}, "adapters": {"state_dir": str(tmp_path / "state")}}
    document = {
        "http_options": {"port": free_port()},
        "applications": [{"import_path": "app.main:build", "args": args}],
    }
    (tmp_path / "c.yaml").write_text(json.dumps(document))
    assert main(["doctor", "--config", str(tmp_path / "c.yaml")]) == 0
    said = capsys.readouterr().out
    assert "FAIL" not in said
    assert "one engine of smollm2-135m-instruct takes 1.38 GiB at start, and up to" in said
    assert "adapters of rank 16 on the device" in said
