"""Adapters are served with the same answers whatever decides on their replicas."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import app.deployments.placement.policies
from load_tests.service import free_port
from tests.e2e.process import polylora_serve, tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model

#: A service for each; tests/deployments/placement has every policy by day.
pytestmark = pytest.mark.nightly

POLICIES = sorted(path.stem for path in Path(app.deployments.placement.policies.__path__[0]).glob("[a-z]*.py"))
NAMES = [f"a{index}" for index in range(6)]
TEXTS: dict[str, str] = {}


@pytest.mark.parametrize("policy", POLICIES)
def test_adapters_are_served_by_each_policy(policy: str, tmp_path: Path) -> None:
    """With sticky every adapter is to have two replicas, however little it is asked for."""
    save_tiny_model(tmp_path / "model")
    for seed, name in enumerate(NAMES):
        save_adapter(tmp_path / "loras" / name, rank=1 + seed, seed=seed)
    port = free_port()
    engine = {"cpu": {"num_threads": 1}, "num_kv_blocks": 64, "lora_pool_rows": 64}
    document = tiny_document(port, tmp_path, engine, num_replicas=2, preload=NAMES)
    placement: dict[str, Any] = {"policy": policy}
    if policy == "sticky":
        placement["min_replicas_per_adapter"] = 2
    document["applications"][0]["args"]["placement"] = placement
    process = polylora_serve(document, port)
    try:
        process.wait_until_said("Ready after", 600)
        with httpx.Client(base_url=process.url, timeout=600) as http:
            for name in NAMES:
                ask(http, name)
            deadline_s, least = time.monotonic() + 300, 2 if policy == "sticky" else 1
            while few := [name for name in NAMES if num_replicas(http, name) < least]:
                assert time.monotonic() < deadline_s, few
                for name in few:
                    ask(http, name)
                time.sleep(0.2)
    finally:
        process.stop()


def ask(http: httpx.Client, name: str) -> None:
    """The answer is the same with every policy."""
    body = {"model": name, "prompt": "the quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
    assert TEXTS.setdefault(name, text) == text


def num_replicas(http: httpx.Client, name: str) -> int:
    """How many replicas' devices hold the adapter."""
    return len(http.get(f"/v1/loras/{name}").json()["residency"]["replicas"])
