"""HTTP beside the engine alone: the same prompts, tokens and adapters on both sides."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from app.config import AppConfig, load_config
from load_tests.http import bench_http
from load_tests.http.bench_http import Bench, Case, run
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.load_tests.fake_server import FakeServer

NUM_TOKENS = 6


@pytest.fixture
def config(tmp_path: Path) -> AppConfig:
    save_tiny_model(tmp_path / "model")
    for index, name in enumerate(("one", "two")):
        save_adapter(tmp_path / "adapters" / name, rank=4 + index, seed=index)
    return load_config({
        "model": {"uri": str(tmp_path / "model"), "name": "tiny"},
        "engine": {"num_kv_blocks": 64, "lora_pool_rows": 32, "cpu": {"num_threads": 1}},
        "adapters": {
            "roots": [str(tmp_path / "adapters")],
            "preload": [{"name": "one", "path": "one"}, {"name": "two", "path": "two"}],
            "state_dir": str(tmp_path / "state"),
        },
    })  # fmt: skip


def test_both_sides_are_asked_the_same(config: AppConfig, server: tuple[str, FakeServer]) -> None:
    url, fake = server
    lines: list[dict[str, Any]] = []
    table = run(Bench(config, url, None, 5, NUM_TOKENS, seed=0), (1, 4), 2, lines.append)
    assert [line["kind"] for line in lines] == ["run"] * 16 + ["ratio"] * 4
    assert all(line["tokens_per_s"] > 0 for line in lines[:16])
    assert len(table.splitlines()) == 2 + 4
    # Warm-up (4 streams, with and without adapters) and two rounds of 1 and 4, each with and without.
    assert len(fake.bodies) == 2 * 4 + 2 * 2 * (1 + 4)
    assert Counter(body["model"] for body in fake.bodies) == {"tiny": 4 + 2 * (1 + 4) + 2 + 2 * 3, "one": 3, "two": 3}
    assert len({body["prompt"] for body in fake.bodies}) == len(fake.bodies)  # nobody profits from a prefix cache
    assert all(body["ignore_eos"] and body["max_tokens"] == NUM_TOKENS for body in fake.bodies)


def test_the_cpu_of_the_service_s_processes_is_divided_by_tokens(
    config: AppConfig, server: tuple[str, FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([{"ingress": 1.0}, {"ingress": 1.5, "engine": 3.0}])
    monkeypatch.setattr(bench_http, "cpu_seconds", lambda session_id: next(readings) if session_id == 7 else {})
    bench = Bench(config, server[0], 7, 5, NUM_TOKENS, seed=0)
    bench.measure(Case(True, False, 4))
    assert bench.cpu_us[4] == {"ingress": [0.5e6 / (4 * NUM_TOKENS)], "engine": [3e6 / (4 * NUM_TOKENS)]}


def test_a_failed_request_ends_the_measurement(config: AppConfig, server: tuple[str, FakeServer]) -> None:
    renamed = config.model_copy(update={"model": config.model.model_copy(update={"name": "refuse"})})
    with pytest.raises(RuntimeError, match="refuse: HTTP 429"):
        Bench(renamed, server[0], None, 5, NUM_TOKENS, seed=0).measure(Case(True, False, 1))
