"""A batch goes on after everything was killed while it was computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.restart.test_restart import PROMPT, complete, start, until
from tests.e2e.tiny import save_adapter, save_tiny_model

#: By day tests/deployments/object_storage/test_batches.py has batches of runners that died.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

NUM_LINES = 2000


def test_a_batch_survives_a_restart(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    for seed, name in enumerate("ab"):
        save_adapter(tmp_path / "loras" / name, rank=8, seed=seed)
    process = start(tmp_path)
    with httpx.Client(base_url=process.url, timeout=600) as http:
        for name in "ab":
            assert http.post("/v1/loras", json={"name": name, "path": name, "wait": True}).status_code == 201
        texts = [complete(http, name) for name in "ab"]
        batch_id = begin_batch(http)
        until(lambda: status(http, batch_id)["request_counts"]["completed"] > 0)
        assert status(http, batch_id)["request_counts"]["completed"] < NUM_LINES
        process.kill_everything()
    process = start(tmp_path)
    try:
        with httpx.Client(base_url=process.url, timeout=600) as http:
            until(lambda: status(http, batch_id).get("status") == "completed")
            assert status(http, batch_id)["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
            answers = http.get(f"/v1/files/{status(http, batch_id)['output_file_id']}/content").text.splitlines()
            found = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, answers)}
            assert len(answers) == len(found) == NUM_LINES, "each line is answered once"
            for index in range(NUM_LINES):
                assert found[str(index)]["choices"][0]["text"] == texts[index % 2]
    finally:
        process.stop()


def begin_batch(http: httpx.Client) -> str:
    """A batch of two adapters in turn; its id."""
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": PROMPT | {"model": "ab"[n % 2]}}
        for n in range(NUM_LINES)
    ]
    text = "\n".join(map(json.dumps, lines))
    sent = http.post("/v1/files", files={"file": ("lines.jsonl", text)}, data={"purpose": "batch"}).raise_for_status()
    body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(http.post("/v1/batches", json=body).raise_for_status().json()["id"])


def status(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    """The batch, or an error while the registry's process is not reached."""
    found: dict[str, Any] = http.get(f"/v1/batches/{batch_id}").json()
    return found
