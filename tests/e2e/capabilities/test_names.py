"""What a name may mean: a canary, a combination, an adapter with more traffic than others."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import httpx
import numpy as np
import pytest
from peft import PeftModel

from tests.e2e.capabilities.conftest import TOLERANCE, Company, Project, expected_logprobs
from tests.e2e.capabilities.test_adapter_kinds import TOKENS, under_peft
from tests.e2e.tiny import save_adapter
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS

pytestmark = PEFT_WARNINGS


@pytest.fixture
def pair(project: Project) -> Project:
    """A project with the adapters a and b, which are loaded."""
    for seed, name in enumerate("ab"):
        save_adapter(project.folder / name, rank=4, seed=70 + seed)
        project.load(name)
    return project


def answered_by(http: httpx.Client, model: str, user: str | None = None) -> str:
    """The adapter that computed an answer."""
    body: dict[str, Any] = {"model": model, "prompt": "x", "max_tokens": 1} | ({"user": user} if user else {})
    answer = http.post("/v1/completions", json=body).raise_for_status()
    return answer.headers["x-polylora-adapter"].partition("@")[0]


def test_canary_promote_and_roll_back(pair: Project) -> None:
    users = [f"user-{index}" for index in range(60)]
    with pair.http() as http:
        http.put("/v1/aliases/app", json={"targets": {"a": 3, "b": 1}}).raise_for_status()
        drawn = Counter(answered_by(http, "app") for _ in range(120))
        assert drawn.keys() == {"a", "b"}
        assert 60 < drawn["a"] < 115, drawn  # 90 are expected, 4.7 is their standard deviation
        of_user = {user: answered_by(http, "app", user) for user in users}
        assert set(of_user.values()) == {"a", "b"}
        assert {user: answered_by(http, "app", user) for user in users} == of_user
        http.post("/v1/aliases/app/promote", json={"target": "b"}).raise_for_status()
        assert {answered_by(http, "app") for _ in range(10)} == {"b"}
        http.post("/v1/aliases/app/rollback").raise_for_status()
        assert {user: answered_by(http, "app", user) for user in users} == of_user
        versions = http.get("/v1/aliases/app/versions").json()["data"]
        assert [(each["id"], each["is_in_force"]) for each in versions] == [(2, False), (1, True)]


def test_weighted_and_registered_combinations(company: Company, pair: Project) -> None:
    def combined(method: str, **options: Any) -> np.ndarray:
        peft: PeftModel = under_peft(company.model, pair.folder / "a")
        peft.load_adapter(pair.folder / "b", "b")
        peft.add_weighted_adapter(["default", "b"], [0.7, 0.4], "mix", combination_type=method, **options)
        peft.set_adapter("mix")
        return expected_logprobs(peft, TOKENS)

    parts = [{"name": "a", "weight": 0.7}, {"name": "b", "weight": 0.4}]
    found = pair.logprobs("tiny", TOKENS, adapters=parts)
    np.testing.assert_allclose(found, combined("cat"), rtol=0, atol=TOLERANCE)
    with pair.http() as http:
        mix = {"name": "mix", "combine": {"adapters": parts, "method": "ties", "density": 0.5}, "wait": True}
        answer = http.post("/v1/loras", json=mix)
        assert answer.status_code == 201, answer.text
    np.testing.assert_allclose(pair.logprobs("mix", TOKENS), combined("ties", density=0.5), rtol=0, atol=TOLERANCE)


def test_a_traffic_weight_gives_an_adapter_both_replicas(company: Company, project: Project) -> None:
    """Of the operator: it takes memory from all. One request after the other would need one replica."""
    save_adapter(company.loras / "busy", rank=4, seed=75)
    with company.admin() as http, project.http() as asking:
        body = {"name": "busy", "path": "busy", "traffic_weight": 100, "wait": True}
        assert http.post("/v1/loras", json=body).status_code == 201
        deadline_s = time.monotonic() + 300
        while len(http.get("/v1/loras/busy").json()["residency"]["replicas"]) < 2:
            assert time.monotonic() < deadline_s
            assert answered_by(asking, "busy") == "busy"
            time.sleep(0.2)
