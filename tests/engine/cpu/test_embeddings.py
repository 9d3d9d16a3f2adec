"""Embeddings of decoders on the CPU: transformers' and PEFT's states, and the same bits in any batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from app.engine.api import LLM
from app.engine.config import CpuConfig, EngineConfig
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import PoolingParams
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, write_peft
from tests.engine.checkpoints import save, tiny_model
from tests.engine.served import write_tokenizer
from tests.seeds import rng

# PEFT 0.21 still asks transformers 5.23 for a name it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CONFIG = EngineConfig(
    cpu=CpuConfig(num_threads=2), num_kv_blocks=64, lora_pool_rows=64, max_num_batched_tokens=24, max_num_seqs=5
)


@pytest.mark.parametrize("family", ["llama tied, biased", "qwen3"])
def test_embeddings_equal_transformers_and_peft_in_one_batch(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    folder = save(model, tmp_path / "model")
    write_tokenizer(folder)
    spec = load_checkpoint(folder).spec
    adapters = [None]
    for rank in (3, 8, 16):
        tensors = peft_tensors(random_arrays(spec, rank))
        adapters.append(write_peft(tmp_path / f"adapter{rank}", peft_config(rank), tensors))
    texts = [rng().integers(3, 96, n).tolist() for n in (1, 2, 15, 16, 17, 40, 64, 100)]
    paths = [adapters[index % 4] for index in range(8)]
    with LLM(folder, CONFIG) as llm:
        for method in ("last", "mean"):
            params = PoolingParams(method)
            together = llm.embed(texts, paths, params)
            for text, path, vector in zip(texts, paths, together, strict=True):
                np.testing.assert_array_equal(llm.embed(text, path, params)[0], vector)
                expected = _reference(model, path, text, method)
                assert np.abs(vector - expected).max() < 1e-5
                short = llm.embed(text, path, PoolingParams(method, 7))[0]
                np.testing.assert_allclose(short, expected[:7] / np.linalg.norm(expected[:7]), rtol=0, atol=2e-5)


def _reference(model: torch.nn.Module, path: Path | None, text: list[int], method: str) -> np.ndarray:
    adapted = PeftModel.from_pretrained(model, str(path)).eval() if path is not None else None  # type: ignore[arg-type]
    with torch.no_grad():
        output = (adapted or model)(torch.tensor([text]), output_hidden_states=True)
    states = output.hidden_states[-1][0].double().numpy()  # behind the last norm
    if adapted is not None:
        adapted.unload()
    vector = states[-1] if method == "last" else states.mean(axis=0)
    return np.asarray(vector / np.linalg.norm(vector))
