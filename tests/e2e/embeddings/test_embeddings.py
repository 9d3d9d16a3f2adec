"""`configs/serve-embeddings.yaml`, end to end: a real sentence encoder, an adapter of it, and the official client."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from app.cli.config_file import read_settings
from app.engine.api import LLM
from load_tests.random_adapters import write_random_adapter
from load_tests.service import ROOT, free_port
from tests.e2e.process import ServiceProcess

#: By day tests/deployments/ingress/http/test_embeddings.py has the route, tests/engine/test_embeddings.py the vectors.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

#: The second is about what the first is, the third is not.
TEXTS = ["A man is eating food.", "Someone has a meal.", "The stock market fell by two percent."]


def test_the_configured_encoder_embeds_with_the_base_and_an_adapter(tmp_path: Path) -> None:
    settings = read_settings(ROOT / "configs/serve-embeddings.yaml")
    with LLM(settings.model.uri, settings.engine) as llm:
        adapter = write_random_adapter(tmp_path / "style", llm.spec, 8, seed=0)
        chosen = {settings.model.name: None, "style": adapter}
        expected = {name: np.stack(llm.embed(TEXTS, path)) for name, path in chosen.items()}
    port = free_port()
    command = [sys.executable, "-c", "import sys; from app.cli.main import main; sys.exit(main())"]
    options = ["serve", "--config", "configs/serve-embeddings.yaml", "--port", str(port)]
    process = ServiceProcess([*command, *options], port, {"LORA_PATH": str(tmp_path)})
    try:
        process.wait_until_healthy(600)
        loaded = httpx.post(
            f"{process.url}/v1/load_lora_adapter", json={"lora_name": "style", "lora_path": "style"}, timeout=120
        )
        assert loaded.status_code == 200, loaded.text
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            for name, vectors in expected.items():
                answer = client.embeddings.create(model=name, input=TEXTS)
                found = np.array([item.embedding for item in answer.data], np.float32)
                np.testing.assert_array_equal(found, vectors)
                assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
            assert not np.array_equal(*expected.values())
            base = expected[settings.model.name]
            assert base[0] @ base[1] > 0.5
            assert base[0] @ base[2] < 0.2
            with pytest.raises(openai.BadRequestError, match="is an encoder"):
                client.chat.completions.create(
                    model=settings.model.name, messages=[{"role": "user", "content": "Hello"}]
                )
            with pytest.raises(openai.BadRequestError, match="the context holds 512"):
                client.embeddings.create(model="style", input="word " * 600)
    finally:
        process.stop()
