"""Every way in which an adapter comes into the service."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.capabilities.conftest import TOLERANCE, Company, Project, expected_logprobs, polylora
from tests.e2e.capabilities.test_adapter_kinds import TOKENS, under_peft
from tests.e2e.tiny import save_adapter
from tests.engine.adapters.formats.test_peft_parity import PEFT_WARNINGS

pytestmark = PEFT_WARNINGS


def check(company: Company, project: Project, name: str, folder: Path) -> None:
    """The name has PEFT's probabilities of the adapter in the folder."""
    expected = expected_logprobs(under_peft(company.model, folder), TOKENS)
    np.testing.assert_allclose(project.logprobs(name, TOKENS), expected, rtol=0, atol=TOLERANCE)


def test_names_of_a_manifest_are_read_by_their_first_request(company: Company, project: Project) -> None:
    names = [f"lazy-{index}" for index in range(20)]
    for seed, name in enumerate(names):
        save_adapter(project.folder / name, rank=1 + seed % 4, seed=seed)
    with project.http() as http:
        manifest = {"adapters": [{"name": name, "path": project.path(name)} for name in names]}
        http.post("/v1/loras/manifest", json=manifest).raise_for_status()
        assert http.get("/v1/loras/lazy-3").json()["state"] == "REGISTERED"
        check(company, project, "lazy-3", project.folder / "lazy-3")
        assert http.get("/v1/loras/lazy-3").json()["state"] == "LOADED"
        assert http.get("/v1/loras/lazy-4").json()["state"] == "REGISTERED"
        assert http.post("/v1/loras/lazy-4/load").status_code in (200, 201)
        assert http.get("/v1/loras/lazy-4").json()["state"] == "LOADED"
    with project.openai() as client:
        assert {model.id for model in client.models.list()} >= {"tiny", *names}


def test_a_name_that_nobody_registered_is_found_below_lora_path(company: Company, project: Project) -> None:
    save_adapter(project.folder / "found", rank=3, seed=31)
    check(company, project, "found", project.folder / "found")
    with project.openai() as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model="nowhere", prompt="x", max_tokens=1)


def test_routes_of_vllm_and_dynamo(company: Company, project: Project) -> None:
    for seed, name in enumerate(("one", "two")):
        save_adapter(project.folder / name, rank=2, seed=40 + seed)
    with project.http() as http:
        body: dict[str, Any] = {"lora_name": "of-vllm", "lora_path": project.path("one")}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        check(company, project, "of-vllm", project.folder / "one")
        assert http.post("/v1/load_lora_adapter", json=body | {"lora_path": project.path("two")}).status_code == 400
        again = body | {"lora_path": project.path("two"), "load_inplace": True}
        replaced = http.post("/v1/load_lora_adapter", json=again)
        assert replaced.status_code == 200
        check(company, project, "of-vllm", project.folder / "two")
        loaded = http.post("/v1/load_lora", json={"base_model": "tiny", "lora_model": "one"})
        assert (loaded.status_code, loaded.json()["status"]) == (200, "success"), loaded.text
        check(company, project, "one", project.folder / "one")
        assert http.post("/v1/unload_lora", json={"lora_model": "one"}).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "of-vllm"}).status_code == 200
    with project.openai() as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model="of-vllm", prompt="x", max_tokens=1)


def test_an_upload_while_answers_stream(company: Company, project: Project, tmp_path: Path) -> None:
    save_adapter(project.folder / "streaming", rank=4, seed=50)
    save_adapter(tmp_path / "uploaded", rank=4, seed=51)
    project.load("streaming")
    question: dict[str, Any] = {"model": "streaming", "prompt": "the quick", "max_tokens": 400, "temperature": 0}
    question["extra_body"] = {"ignore_eos": True}
    with project.openai() as client:
        whole = client.completions.create(**question).choices[0].text
        stream = client.completions.create(**question, stream=True)
        pieces = [next(stream).choices[0].text]
        reading = threading.Thread(
            target=lambda: pieces.extend(part.choices[0].text for part in stream if part.choices)
        )
        reading.start()
        with project.http() as http:
            files = [tmp_path / "uploaded" / name for name in ("adapter_config.json", "adapter_model.safetensors")]
            parts = {"config": files[0].read_bytes(), "weights": files[1].read_bytes()}
            answer = http.put("/v1/loras/uploaded/weights", files=parts)
            assert answer.status_code in (200, 201), answer.text
        reading.join(600)
    assert "".join(pieces) == whole
    check(company, project, "uploaded", tmp_path / "uploaded")


def test_signatures(company: Company) -> None:
    """Of the service's own adapters: a right one is told, a wrong one is refused."""
    for seed, name in enumerate(("signed", "forged")):
        save_adapter(company.loras / name, rank=2, seed=60 + seed)
        polylora("sign", company.loras / name, "--key", company.signing_key, "--base", company.folder / "model")
    save_adapter(company.loras / "forged", rank=2, seed=69)  # other weights below the signature
    with company.admin() as http:
        signed = http.post("/v1/loras", json={"name": "signed", "path": "signed", "wait": True})
        assert signed.status_code == 201, signed.text
        forged = http.post("/v1/loras", json={"name": "forged", "path": "forged", "wait": True})
    assert forged.status_code == 403, forged.text
    assert "does not fit the contents" in forged.text
