"""48 variants of adapters through vLLM equal PEFT in float32; the same files given to vLLM directly are counted."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import EngineConfig
from app.engine.models.checkpoint import load_checkpoint
from app.engine.vllm.engine import WORKER, worker_arguments
from app.engine.vllm.worker_process import WorkerProcess
from tests.engine.models.hf.test_headers import FAMILIES, write, write_adapter
from tests.engine.running import MAX_LORAS, WAIT_S, Served, vllm_python, vllm_section, write_model

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),  # not all modules are targets
]

PROMPT, NUM_TOKENS, TOLERANCE = (5, 6, 7, 8, 9), 8, 1e-4
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
TARGETS = {"all": ATTENTION + MLP, "attention": ATTENTION, "two": ["q_proj", "down_proj"], "mlp": MLP}
SHAPES: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 2},
    "rank 3": {"r": 3, "lora_alpha": 7},
    "rank 8": {"r": 8, "lora_alpha": 8},
    "rank 64": {"r": 64, "lora_alpha": 16},
    "rslora": {"r": 4, "lora_alpha": 3, "use_rslora": True},
    "rslora 48": {"r": 48, "lora_alpha": 5, "use_rslora": True},
    "rank pattern": {"r": 4, "lora_alpha": 4, "rank_pattern": {"q_proj": 16, "layers.1.mlp.down_proj": 2}},
    "larger rank pattern": {"r": 2, "lora_alpha": 6, "rank_pattern": {".*proj": 40}},
    "alpha pattern": {"r": 8, "lora_alpha": 8, "alpha_pattern": {"down_proj": 20, "k_proj": 1}},
    "both patterns": {
        **{"r": 4, "lora_alpha": 8, "use_rslora": True},
        **{"rank_pattern": {"down_proj": 12}, "alpha_pattern": {"q_proj": 3}},
    },
    "some layers": {"r": 8, "lora_alpha": 16, "layers_to_transform": [1]},
    "orthogonal": {"r": 8, "lora_alpha": 16, "init_lora_weights": "orthogonal"},
}
VARIANTS = [f"{shape}, {targets}" for shape, targets in product(SHAPES, TARGETS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder per variant, and beside it what PEFT's model answers: tokens and their log-probabilities."""
    root = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(5)
    for variant in VARIANTS:
        shape, _, targets = variant.partition(", ")
        base = AutoModelForCausalLM.from_pretrained(folder)
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=TARGETS[targets], **SHAPES[shape])).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(root / variant)
        torch.save(expected(model), root / variant / "expected.pt")
        (root / variant / "expected.pt").rename(root / f"{variant}.pt")
    return root


def expected(model: Any) -> tuple[list[int], list[float]]:
    known, values = list(PROMPT), []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            line = torch.log_softmax(model(torch.tensor([known])).logits[0, -1].double(), -1)
            known.append(int(line.argmax()))
            values.append(float(line.max()))
    return known[len(PROMPT) :], values


def config() -> EngineConfig:
    section = vllm_section("vllm") | {"max_lora_rank": 64}
    return EngineConfig.model_validate({"vllm": section, "max_num_seqs": 4})


@pytest.fixture(scope="module")
def served(folder: Path, adapters: Path) -> Iterator[Served]:  # noqa: ARG001  (made before vLLM takes the processor)
    served = Served("vllm", folder, config())
    yield served
    assert served.engine.stop(60)


def assert_equal(found: tuple[list[int], list[float]], wanted: tuple[list[int], list[float]]) -> None:
    assert found[0] == wanted[0]
    assert max(abs(a - b) for a, b in zip(found[1], wanted[1], strict=True)) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_equals_peft(served: Served, adapters: Path, variant: str) -> None:
    adapter = read_adapter(adapters / variant, served.spec)
    name = served.submit(PROMPT, adapter, num_logprobs=0, max_tokens=NUM_TOKENS)
    tokens = served.tokens(name)
    values = [line.logprob for chunk in served.chunks[name] for line in chunk.logprobs]
    assert_equal((tokens, values), torch.load(adapters / f"{variant}.pt"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_only_vllm_computes_equals_peft(tmp_path: Path, family: str) -> None:
    model = write(tmp_path / "model", family)
    trained = write_adapter(tmp_path / "lora", model)
    served = Served("vllm", tmp_path / "model", config())
    try:
        name = served.submit(PROMPT, read_adapter(tmp_path / "lora", served.spec), num_logprobs=0)
        tokens = served.tokens(name)
        values = [line.logprob for chunk in served.chunks[name] for line in chunk.logprobs]
        assert_equal((tokens, values), expected(trained))
    finally:
        assert served.engine.stop(60)


def test_the_same_files_given_to_vllm_directly(
    folder: Path, adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reported, not required: how many vLLM itself refuses or computes otherwise than PEFT."""
    frames: queue.Queue[dict[str, Any]] = queue.Queue()
    arguments = worker_arguments(load_checkpoint(folder), config())
    process = WorkerProcess([vllm_python(), str(WORKER)], arguments, {}, frames.put, lambda _: None)
    refused, wrong = [], []
    try:
        process.wait_ready()
        for index, variant in enumerate(VARIANTS, 1):
            lora = {"name": variant, "lora_id": index, "path": str(adapters / variant)}
            process.send({"type": "add_lora", "call": index, **lora})
            if frames.get(timeout=WAIT_S)["error"] is not None:
                refused.append(variant)
                continue
            sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
            request = {"id": variant, "token_ids": list(PROMPT), "sampling": sampling, "lora": lora, "salt": ""}
            process.send({"type": "generate", **request})
            tokens, values = [], []
            while len(tokens) < NUM_TOKENS:
                for line in frames.get(timeout=WAIT_S)["outputs"]:
                    tokens += line["tokens"]
                    values += [value for value, _ in line["logprobs"]]
            try:
                assert_equal((tokens, values), torch.load(adapters / f"{variant}.pt"))
            except AssertionError:
                wrong.append(variant)
            if index > MAX_LORAS:
                process.send({"type": "remove_lora", "call": 1000 + index, "lora_id": index - MAX_LORAS})
                frames.get(timeout=WAIT_S)
    finally:
        process.close()
    with capsys.disabled():
        print(
            f"\nof {len(VARIANTS)} given to vLLM directly: {len(refused)} refused {refused}, {len(wrong)} wrong {wrong}"
        )
