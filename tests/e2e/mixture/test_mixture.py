"""`configs/serve-moe.yaml`, end to end: a mixture trained here and two adapters of it, one on experts alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from examples.training import mixture
from examples.training.mixture import ADAPTERS, ANSWER, LONGEST, VOCABULARY, train, words
from load_tests.service import ROOT, free_port
from tests.e2e.process import ServiceProcess

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,  # training takes minutes; tests/engine has every layout of adapters against PEFT
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's, on parameters as targets
    # PEFT looks for the ranks of fused experts among modules only.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's own use
]

#: Of the example's 1,500 and 300: enough that models say what they have learned, right or wrong.
BASE_STEPS, ADAPTER_STEPS, NUM_WORDS = 120, 40, 40


def _config(folder: Path) -> Path:
    """The configuration with its model and adapters in `folder`."""
    document = yaml.safe_load((ROOT / "configs/serve-moe.yaml").read_text())
    arguments = document["applications"][0]["args"]
    for path in (arguments["model"]["uri"], *arguments["adapters"]["roots"]):
        assert path.startswith("build/mixture/"), "where the example writes to"
    arguments["model"]["uri"] = str(folder / "model")
    arguments["adapters"]["roots"] = [str(folder / "adapters")]
    written = folder / "serve.yaml"
    written.write_text(yaml.safe_dump(document))
    return written


@torch.inference_mode()
def _answer(model: Any, word: str) -> str:
    """Greedy, by transformers and PEFT."""
    prompt = torch.tensor([[VOCABULARY.index(char) for char in word + ANSWER]])
    found = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LONGEST + 1, do_sample=False,
        eos_token_id=1, pad_token_id=0,
    )[0, prompt.shape[1] :].tolist()  # fmt: skip
    return "".join(VOCABULARY[token] for token in found if token > 1)


def _expected(folder: Path, asked: list[str]) -> dict[str, list[str]]:
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    found = {"mixture": [_answer(base, word) for word in asked]}
    for name in ADAPTERS:
        model = PeftModel.from_pretrained(base, folder / "adapters" / name).eval()
        found[name] = [_answer(model, word) for word in asked]
        base = model.unload()
    return found


def _rate(answers: list[str], asked: list[str], transform: Callable[[str], str]) -> float:
    return sum(answer == transform(word) for answer, word in zip(answers, asked, strict=True)) / len(asked)


def test_base_and_both_adapters_answer_as_peft_does_and_pass_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture, "HELD_OUT", 1)  # the example's own rates take as long as training does here
    train(tmp_path, base_steps=BASE_STEPS, adapter_steps=ADAPTER_STEPS)
    asked = words(Random(7), NUM_WORDS, held_out=True)
    expected = _expected(tmp_path, asked)
    assert expected["mixture"] != expected["reverse"] != expected["ascending"] != expected["mixture"]
    port = free_port()
    command = [sys.executable, "-c", "import sys; from app.cli.main import main; sys.exit(main())"]
    process = ServiceProcess([*command, "serve", "--config", str(_config(tmp_path)), "--port", str(port)], port, {})
    try:
        process.wait_until_healthy(600)
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            for name, answers in expected.items():
                found = [
                    client.chat.completions.create(
                        model=name, temperature=0, max_tokens=LONGEST + 1, messages=[{"role": "user", "content": word}]
                    ).choices[0].message.content
                    or ""
                    for word in asked
                ]  # fmt: skip
                assert found == answers, name
                if name in ADAPTERS:
                    transform = ADAPTERS[name][0]
                    of_base = _rate(expected["mixture"], asked, transform)
                    assert _rate(found, asked, transform) > of_base, "the adapter has learned something"
    finally:
        process.stop()
