"""Encoders on the CPU: transformers' and PEFT's embeddings, and the same bits in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from app.engine.api import LLM
from app.engine.config import CpuConfig, EngineConfig, XlaConfig
from app.engine.errors import AdapterMismatch, CheckpointError, ConfigError, ContextOverflow, InvalidRequest
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import PoolingParams, SamplingParams
from tests.engine.encoders import MODELS, reference_embedding, save_adapter, save_encoder, tiny_encoder
from tests.engine.models.tokenizers.test_hf_tokenizer import BACKENDS
from tests.seeds import rng

# PEFT 0.21 still asks transformers 5.23 for a name it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CONFIG = EngineConfig(
    cpu=CpuConfig(num_threads=2), lora_pool_rows=96, max_num_batched_tokens=160, max_num_seqs=9, max_queued_requests=20
)
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 3, "lora_alpha": 6, "target_modules": ["query", "key", "value"]},
    "everything": {"r": 16, "target_modules": "all-linear", "use_rslora": True},
    "dense, the pooler too": {"r": 8, "target_modules": ["dense"], "rank_pattern": {"intermediate.dense": 5}},
    "dora": {"r": 8, "target_modules": ["query", "output.dense"], "use_dora": True},
    "biased": {"r": 4, "target_modules": ["value", "intermediate.dense"], "lora_bias": True},
    "one layer": {"r": 2, "target_modules": ["key"], "layers_to_transform": [1], "layers_pattern": "layer"},
}


@pytest.mark.parametrize("kind", MODELS)
def test_embeddings_equal_transformers_and_peft_and_keep_their_bits_in_a_batch(kind: str, tmp_path: Path) -> None:
    model = tiny_encoder(kind)
    folder = save_encoder(model, tmp_path / "model")
    paths: list[Path | None] = [None]
    paths += [save_adapter(model, tmp_path / name, **settings) for name, settings in ADAPTERS.items()]
    generator = rng()
    texts = [generator.integers(4, 99, n).tolist() for n in (1, 2, 17, 31, 32, 33, 64, 65, 100, 128, 5, 5, 5, 5)]
    adapters = [paths[index % len(paths)] for index in range(len(texts))]
    with LLM(folder, CONFIG) as llm:
        for method in ("mean", "cls", "last"):
            params = PoolingParams(method)
            together = llm.embed(texts, adapters, params)
            for text, path, vector in zip(texts, adapters, together, strict=True):
                np.testing.assert_array_equal(llm.embed(text, path, params)[0], vector)
                assert np.abs(vector - reference_embedding(model, path, text, method)).max() < 1e-5, (method, path)
        order = generator.permutation(len(texts)).tolist()
        shuffled = llm.embed([texts[i] for i in order], [adapters[i] for i in order])
        alone = llm.embed(texts, adapters)
        for place, index in enumerate(order):
            np.testing.assert_array_equal(shuffled[place], alone[index])
        assert llm.stats().num_blocks == 0
        assert llm.tokenizer.encode("ab c") == [2, 4, 31, 6, 3]
        np.testing.assert_array_equal(llm.embed("ab c")[0], llm.embed([2, 4, 31, 6, 3])[0])


@pytest.mark.parametrize("kind", MODELS)
def test_padding_s_token_in_a_text_takes_no_place_of_the_text_s_own(kind: str, tmp_path: Path) -> None:
    """Who writes "<pad>" gets transformers' embedding: RoBERTa's positions count the other tokens."""
    model = tiny_encoder(kind)
    generator = rng()
    texts = [[1], [1, 1, 5], [5, 1, 6, 7], [4, 5, 1], [0, 1, 0], [9, 8, 7], *generator.integers(0, 4, (4, 30)).tolist()]
    with LLM(save_encoder(model, tmp_path), CONFIG) as llm:
        for method in ("mean", "last"):
            for text, vector in zip(texts, llm.embed(texts, None, PoolingParams(method)), strict=True):
                assert np.abs(vector - reference_embedding(model, None, text, method)).max() < 1e-5, text


@pytest.mark.parametrize("kind", ["xlm-roberta", "camembert"])
def test_texts_are_embedded_by_the_kind_s_own_tokens(kind: str, tmp_path: Path) -> None:
    """SentencePiece with scores: nothing but config.json says which class of transformers' reads it."""
    model = tiny_encoder(kind, vocab_size=BACKENDS[kind].get_vocab_size())
    folder = save_encoder(model, tmp_path / "model")
    BACKENDS[kind].save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").unlink()
    theirs = AutoTokenizer.from_pretrained(folder)
    with LLM(folder, CONFIG) as llm:
        for text in ("The quick brown fox", "Ａ １2  ﬁ naïve <mask> 你好"):
            ids = theirs.encode(text)
            assert llm.tokenizer.encode(text) == ids
            assert np.abs(llm.embed(text)[0] - reference_embedding(model, None, ids, "mean")).max() < 1e-5


def test_what_an_encoder_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_encoder("roberta")
    folder = save_encoder(model, tmp_path / "model")
    trained = save_adapter(model, tmp_path / "norms", target_modules=["query"], bias="all")
    with LLM(folder, CONFIG) as llm:
        assert llm.spec.max_positions == 128, "two places of RoBERTa's table are nobody's"
        with pytest.raises(InvalidRequest, match="is an encoder"):
            llm.generate([[4, 5]], None, SamplingParams())
        with pytest.raises(ContextOverflow, match="129 tokens but the context holds 128"):
            llm.embed([[5] * 129])
        with pytest.raises(AdapterMismatch, match="trained biases"):
            llm.embed([[5]], [trained])
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 127 but an encoder"):
        LLM(folder, CONFIG.model_copy(update={"max_num_batched_tokens": 127}))
    with pytest.raises(ConfigError, match=r"engine\.xla cannot compute"):
        load_backend(load_checkpoint(folder), CONFIG.on(XlaConfig()))


def test_checkpoints_with_a_head_and_with_a_pooling_of_their_own_are_read(tmp_path: Path) -> None:
    model = tiny_encoder("bert")
    folder = save_encoder(model, tmp_path / "model")
    plain = load_checkpoint(folder)
    assert plain.spec.pooling == "mean"
    expected = dict(plain.tensors())
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["cls.predictions.bias"] = np.zeros(99, np.float32)
    tensors["bert.embeddings.position_ids"] = np.arange(130)[None]
    save_file(tensors, folder / "model.safetensors")
    (folder / "1_Pooling").mkdir()
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    with_head = load_checkpoint(folder)
    assert with_head.spec.pooling == "cls"
    found = dict(with_head.tensors())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(CheckpointError, match="pooling_mode_max_tokens"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu_new"), ("position_embedding_type", "relative_key"), ("is_decoder", True), ("new_key", 1)],
)
def test_a_configuration_that_means_something_else_is_refused(key: str, value: object, tmp_path: Path) -> None:
    folder = save_encoder(tiny_encoder("bert"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    message = key if key != "is_decoder" else "'bert' is not among the supported families"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)
