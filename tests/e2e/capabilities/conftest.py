"""One `polylora serve` for all tests of this folder, and a project for each: what users do with adapters, each once.

docs/reference/capabilities.md lists what is shown where. A tiny model, two ingresses, two engine replicas; adapters are
in LORA_PATH, and the registry is in PostgreSQL where its programs are installed.
"""

from __future__ import annotations

import itertools
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from app.config import ADMIN_KEY, SECRETS_KEY
from app.deployments.tenancy.auth.key_crypto import new_key
from load_tests.service import ROOT, free_port
from tests.e2e.process import POLYLORA, ServiceProcess, polylora_serve, tiny_document
from tests.e2e.tiny import save_tiny_model
from tests.nightly import mark_folder
from tests.postgres import PostgresServer, find_postgres

KEY = new_key(is_admin=True).value
#: Two float32 programs with another order of sums.
TOLERANCE = 2e-4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_folder(items, __file__, pytest.mark.e2e)


@dataclass(frozen=True)
class Project:
    """A project with a key. `folder`: where its adapters are read from."""

    id: str
    url: str
    key: str
    folder: Path

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=600)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=600)

    def path(self, name: str) -> str:
        """What is below the project's folder, below the root."""
        return f"{self.id}/{name}"

    def load(self, name: str, file: str | None = None) -> None:
        """Load what is in the project's folder under the name, or in this file; it is served when this returns."""
        with self.http() as http:
            answer = http.post("/v1/loras", json={"name": name, "path": self.path(file or name), "wait": True})
        assert answer.status_code == 201, answer.text

    def logprobs(self, model: str, tokens: list[int], **more: Any) -> NDArray[np.float64]:
        """Log-probabilities of the tokens after the first."""
        with self.openai() as client:
            answer = client.completions.create(
                model=model, prompt=tokens, echo=True, logprobs=0, max_tokens=1, temperature=0, extra_body=more
            )
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.token_logprobs is not None
        return np.array(found.token_logprobs[1 : len(tokens)], np.float64)


@dataclass(frozen=True)
class Company:
    """The running service. `model`: its base model in transformers; `signing_key`: the file of a key that it trusts."""

    process: ServiceProcess
    folder: Path
    model: Any
    signing_key: Path

    @property
    def loras(self) -> Path:
        return self.folder / "loras"

    def admin(self) -> httpx.Client:
        return httpx.Client(base_url=self.process.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=600)

    def project(self, name: str) -> Project:
        url = self.process.url
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, admin_api_key=KEY, max_retries=0, timeout=600) as client:
            projects = client.admin.organization.projects
            made = projects.create(name=name)
            account = projects.service_accounts.create(made.id, name="app")
        assert account.api_key is not None
        folder = self.loras / made.id
        folder.mkdir()
        return Project(made.id, url, account.api_key.value, folder)


def polylora(*arguments: object) -> str:
    """Run a command; returns its output."""
    done = subprocess.run(
        [*POLYLORA, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected_logprobs(model: Any, tokens: list[int], **options: Any) -> NDArray[np.float64]:
    """As `Project.logprobs`, by transformers (and PEFT, if the model is PEFT's)."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), **options).logits[0].double()
    chosen = torch.log_softmax(logits[:-1], -1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    found: NDArray[np.float64] = chosen.numpy()
    return found


@pytest.fixture(scope="package")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    folder = tmp_path_factory.mktemp("company")
    save_tiny_model(folder / "model")
    (folder / "loras").mkdir()
    signing_key = folder / "signing.pem"
    public_key = polylora("keygen", signing_key).split()[-1]
    port = free_port()
    engine = {"cpu": {"num_threads": 1}, "num_kv_blocks": 512, "lora_pool_rows": 256}
    document = tiny_document(port, folder, engine, num_replicas=2)
    arguments = document["applications"][0]["args"]
    arguments["adapters"] = {"signing": {"trusted_keys": {"default": [public_key]}}}
    environment = {ADMIN_KEY: KEY, SECRETS_KEY: secrets.token_hex(32), "LORA_PATH": str(folder / "loras")}
    with ExitStack() as running:
        programs = find_postgres()
        if programs is not None:
            server = PostgresServer(programs)
            running.callback(server.stop)
            environment["POLYLORA_REGISTRY_URL"] = server.new_database()
        process = polylora_serve(document, port, environment)
        running.callback(process.stop)
        process.wait_until_said("Ready after", 600)
        yield Company(process, folder, LlamaForCausalLM.from_pretrained(folder / "model").eval(), signing_key)


@pytest.fixture(scope="package")
def make_project(company: Company) -> Callable[[], Project]:
    numbers = itertools.count()
    return lambda: company.project(f"project-{next(numbers)}")


@pytest.fixture
def project(make_project: Callable[[], Project]) -> Project:
    return make_project()
