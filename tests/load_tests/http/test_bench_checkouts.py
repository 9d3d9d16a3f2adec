"""Two checkouts beside each other: both are asked as much, in turns, and told apart."""

from __future__ import annotations

from collections import Counter

import pytest

from app.config import load_config
from load_tests.http import bench_checkouts
from load_tests.http.bench_checkouts import Bench, Case, table
from tests.load_tests.fake_server import FakeServer

CONFIG = load_config({
    "model": {"uri": "/nowhere", "name": "tiny"}, "adapters": {"preload": [{"name": "one", "path": "one"}]},
})  # fmt: skip
NUM_TOKENS = 6


@pytest.fixture
def bench(server: tuple[str, FakeServer], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """This side has used 5 s of CPU at each look more, the other 10 s."""
    used = Counter[int]()

    def cpu_seconds(session_id: int) -> dict[str, float]:
        used[session_id] += 5 * session_id
        return {"engine": float(used[session_id])}

    monkeypatch.setattr(bench_checkouts, "cpu_seconds", cpu_seconds)
    return Bench(CONFIG, {"this": (server[0], 1), "other": (server[0], 2)}, 5, NUM_TOKENS, per_stream=2)


def test_both_are_asked_as_much_and_never_the_same(bench: Bench, server: tuple[str, FakeServer]) -> None:
    lines = table(bench, (2,), 3).splitlines()
    bodies = server[1].bodies
    assert len(bodies) == 4 * 4 * (1 + 3), "4 requests for each of 4 cases, once to begin with and 3 times"
    assert Counter(body["model"] for body in bodies) == {"tiny": 48, "one": 16}
    assert len({body["prompt"] for body in bodies}) == len(bodies)
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["0.50 (0.50 to 0.50) |"] * 2, "of the CPU"


def test_a_failed_request_ends_the_measurement(server: tuple[str, FakeServer]) -> None:
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"name": "refuse"})})
    with pytest.raises(RuntimeError, match="refuse: HTTP 429"):
        Bench(config, {"this": (server[0], 0)}, 5, NUM_TOKENS, per_stream=2).measure(Case("this", False, 1))
