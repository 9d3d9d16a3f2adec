"""Adapters of task type SEQ_CLS: transformers' and PEFT's scores, the same bits in any batch, and clear refusals."""

from __future__ import annotations

import copy
import json
import warnings
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.warning import PeftWarning
from safetensors.numpy import load_file, save_file
from tokenizers.models import WordLevel

from app.engine.adapters.features import FEATURES, SCORE_HEAD
from app.engine.adapters.formats.arrow import ArrowCard, write_card
from app.engine.adapters.formats.convert import write_peft_folder
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.adapters.score_head import num_labels
from app.engine.api import LLM
from app.engine.config import CpuConfig, CudaConfig, EngineConfig, XlaConfig
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterOverflow, AdapterTooLarge, InvalidRequest
from app.engine.factory import served_features
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import PoolingParams, PoolingTask, SamplingParams
from tests.engine.adapters.moe_parity import TOLERANCE, Expected, change_by_rounding
from tests.engine.checkpoints import save, tiny_model
from tests.engine.encoders import save_encoder, tiny_encoder
from tests.seeds import rng

# PEFT 0.21 still asks transformers 5.23 for a name it has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CONFIG = EngineConfig(
    cpu=CpuConfig(num_threads=2), num_kv_blocks=64, lora_pool_rows=96, max_num_batched_tokens=160, max_num_seqs=9,
    max_queued_requests=40,
)  # fmt: skip
#: On a decoder: labels, and what PEFT is asked for.
ADAPTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "reranker": (1, {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    "classes": (3, {"r": 4, "target_modules": "all-linear", "use_rslora": True}),
    "patterns": (
        2,
        {
            "r": 4,
            "target_modules": ["o_proj", "down_proj"],
            "rank_pattern": {"o_proj": 7},
            "alpha_pattern": {"1.mlp.down_proj": 3},
        },
    ),
    "dora": (2, {"r": 4, "target_modules": ["k_proj", "gate_proj"], "use_dora": True}),
    "norms too": (5, {"r": 2, "target_modules": ["up_proj"], "modules_to_save": ["score", "input_layernorm"]}),
}
ENCODERS = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


def save_decoder(model: Any, folder: Path) -> Path:
    """With a tokenizer that nothing here asks."""
    backend = tokenizers.Tokenizer(WordLevel({f"w{index}": index for index in range(99)}, unk_token="w0"))
    backend.save(str(save(model, folder) / "tokenizer.json"))
    return folder


def classifier(model: Any, name: str, labels: int) -> Any:
    """transformers' classifier on the base `model`, with a random head."""
    config = copy.deepcopy(model.config)
    config.num_labels = labels
    found = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    weights = {
        f"{found.base_model_prefix}.{key.removeprefix('model.')}": one for key, one in model.state_dict().items()
    }
    found.load_state_dict(weights, strict=False)
    return found


def save_classifier(model: Any, folder: Path, **settings: Any) -> Path:
    """A random adapter of task SEQ_CLS, as PEFT saves it."""
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="SEQ_CLS", **settings))
    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.02 if "magnitude" in path else 0.2))
    with warnings.catch_warnings():  # PEFT takes a whole weight for a damaged matrix
        warnings.simplefilter("ignore", PeftWarning)
        adapted.save_pretrained(str(folder))
    return folder


def references(model: Any, folder: Path, texts: list[list[int]]) -> list[Expected]:
    """The scores of transformers and PEFT, which loads the folder itself, of each text alone."""
    exact = PeftModel.from_pretrained(copy.deepcopy(model).double(), str(folder)).eval()

    def scores(token_ids: list[int]) -> Any:
        with torch.no_grad():
            return exact(input_ids=torch.tensor([token_ids])).logits[0].numpy()

    found = [scores(token_ids) for token_ids in texts]
    changes = change_by_rounding(exact, lambda: np.array([scores(text) for text in texts]) - np.array(found))
    return [Expected(one, max(TOLERANCE, 5 / 8 * changes)) for one in found]


def scores(llm: LLM, texts: Any, adapters: Any, task: PoolingTask = "classify") -> list[np.ndarray]:
    method = "last" if llm.spec.encoder is None else "cls"
    return llm.embed(texts, adapters, PoolingParams(method, task=task))  # type: ignore[return-value]


def test_a_decoders_scores_equal_transformers_and_keep_their_bits_in_a_batch(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.pad_token_id = None  # transformers takes the last token that is not padding
    folder = save_decoder(model, tmp_path / "model")
    heads = {name: classifier(model, "Llama", labels) for name, (labels, _) in ADAPTERS.items()}
    paths = {
        name: save_classifier(heads[name], tmp_path / name, **settings) for name, (_, settings) in ADAPTERS.items()
    }
    generator = rng()
    lengths = (1, 17, 33, 64, 100, 2, 31, 65, 128, 5)
    names = [list(ADAPTERS)[index % len(ADAPTERS)] for index in range(len(lengths))]
    texts = [generator.integers(3, 99, length).tolist() for length in lengths]
    expected: dict[int, Expected] = {}
    for name in ADAPTERS:
        own = [index for index, other in enumerate(names) if other == name]
        expected |= zip(own, references(heads[name], paths[name], [texts[index] for index in own]), strict=True)
    with LLM(folder, CONFIG) as llm:
        together = scores(llm, texts, [paths[name] for name in names])
        beside = scores(llm, [*texts, texts[0]], [*(paths[name] for name in names), paths["dora"]])[:-1]
        for index, (text, name, found, again) in enumerate(zip(texts, names, together, beside, strict=True)):
            assert found.shape == (ADAPTERS[name][0],)
            np.testing.assert_array_equal(found, again)
            np.testing.assert_array_equal(found, scores(llm, [text], [paths[name]])[0])
            assert expected[index].allows(found), name
        np.testing.assert_array_equal(scores(llm, [texts[0]], [paths["reranker"]], "score")[0], together[0])


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoders_scores_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny_encoder(kind)
    folder = save_encoder(model, tmp_path / "model")
    head = classifier(model, ENCODERS[kind], 3)
    settings: list[dict[str, Any]] = [
        {"target_modules": ["query", "value"]},
        {"target_modules": "all-linear", "use_rslora": True},
    ]
    paths = [save_classifier(head, tmp_path / str(i), r=4, **one) for i, one in enumerate(settings)]
    generator = rng()
    texts = [generator.integers(4, 99, n).tolist() for n in (1, 17, 128)]
    with LLM(folder, CONFIG) as llm:
        for path in paths:
            expected = references(head, path, texts)
            for text, found, theirs in zip(texts, scores(llm, texts, path), expected, strict=True):
                assert theirs.allows(found)
                np.testing.assert_array_equal(found, scores(llm, [text], path)[0])


def test_a_berts_classifier_is_refused_because_it_needs_the_pooler(tmp_path: Path) -> None:
    model = tiny_encoder("bert")
    folder = save_encoder(model, tmp_path / "model")
    path = save_classifier(classifier(model, "Bert", 2), tmp_path / "one", r=2, target_modules=["query"])
    with LLM(folder, CONFIG) as llm, pytest.raises(AdapterMismatch, match="needs the pooler of BERT"):
        scores(llm, [[5]], path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base ("model"), a classifier of three labels ("classes") and a reranker ("reranker") on it."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_model("llama")
    save_decoder(model, folder / "model")
    for name in ("classes", "reranker"):
        labels, settings = ADAPTERS[name]
        save_classifier(classifier(model, "Llama", labels), folder / name, **settings)
    return folder


def test_each_route_is_for_its_own_kind_of_adapter(saved: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(str(plain))
    with LLM(saved / "model", CONFIG) as llm:
        with pytest.raises(InvalidRequest, match=r"generates no text; use POST /v1/score, /v1/rerank or /v1/classify"):
            llm.generate([[4, 5]], saved / "classes", SamplingParams())
        with pytest.raises(InvalidRequest, match="computes no embeddings"):
            llm.embed([[4, 5]], saved / "classes")
        with pytest.raises(InvalidRequest, match=r"the base model has no score head; name an adapter .* SEQ_CLS"):
            scores(llm, [[4, 5]], None)
        with pytest.raises(InvalidRequest, match=r"has no score head; .* POST /v1/chat/completions"):
            scores(llm, [[4, 5]], plain)
        with pytest.raises(InvalidRequest, match="has 3 labels and no single score; use POST /v1/classify"):
            scores(llm, [[4, 5]], saved / "classes", "score")
        with pytest.raises(InvalidRequest, match="dimensions"):
            llm.embed([[4, 5]], saved / "reranker", PoolingParams("last", 1, "classify"))
        with pytest.raises(InvalidRequest, match="pooling is 'mean'"):
            llm.embed([[4, 5]], saved / "reranker", PoolingParams("mean", task="classify"))


def test_engines_without_score_heads_refuse_the_adapter_when_it_is_read(saved: Path) -> None:
    spec = load_checkpoint(saved / "model").spec
    for device in (CudaConfig(), XlaConfig()):
        with pytest.raises(AdapterMismatch, match="this engine cannot apply a score head"):
            read_adapter(saved / "reranker", spec, supported_features=served_features(CONFIG.on(device)))
    adapter = read_adapter(saved / "reranker", spec, supported_features=FEATURES)
    assert adapter.features == {SCORE_HEAD}
    assert (num_labels(adapter), adapter.card.extra_bytes, adapter.card.is_zero) == (1, 0, False)
    assert adapter.card.has_score_head
    assert num_labels(None) == 0


def test_a_head_survives_conversions(saved: Path, tmp_path: Path) -> None:
    spec = load_checkpoint(saved / "model").spec
    raw = read_raw_adapter(saved / "classes", spec)
    write_card(tmp_path / "one.lora.arrow", ArrowCard("one", raw, {}))
    write_peft_folder(tmp_path / "folder", read_raw_adapter(tmp_path / "one.lora.arrow", spec))
    digests = {
        read_adapter(path, spec, supported_features=FEATURES).card.digest
        for path in (saved / "classes", tmp_path / "one.lora.arrow", tmp_path / "folder")
    }
    assert len(digests) == 1
    text = [5, 6, 7]
    head = classifier(tiny_model("llama"), "Llama", 3)
    assert references(head, tmp_path / "folder", [text])[0].logits.shape == (3,), "PEFT loads it"
    with LLM(saved / "model", CONFIG) as llm:
        first, second = scores(llm, [text, text], [saved / "classes", tmp_path / "folder"])
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda tensors, head: tensors.pop(head), AdapterFormatError, r"tensor 'score.weight' is selected"),
        (lambda tensors, head: tensors.update({head: tensors[head][:, :8]}), AdapterMismatch, "hidden states of 40"),
        (lambda tensors, head: tensors.update({head: tensors[head] * np.nan}), AdapterFormatError, "broken"),
        (
            lambda tensors, head: tensors.update({head: np.zeros((1025, 40), np.float32)}),
            AdapterTooLarge,
            "1025 labels, but at most 1024",
        ),
        (
            lambda tensors, head: tensors.update({head.replace("score", "classifier"): tensors.pop(head)}),
            AdapterFormatError,
            "does not exist in the base",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    saved: Path, tmp_path: Path, change: Any, error: type[Exception], words: str
) -> None:
    tensors = load_file(saved / "classes" / "adapter_model.safetensors")
    change(tensors, "base_model.model.score.weight")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((saved / "classes" / "adapter_config.json").read_bytes())
    with pytest.raises(error, match=words):
        read_adapter(tmp_path, load_checkpoint(saved / "model").spec, supported_features=FEATURES)


def test_a_head_needs_its_task_type(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "classes" / "adapter_config.json").read_text()) | {"task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes((saved / "classes" / "adapter_model.safetensors").read_bytes())
    with pytest.raises(AdapterFormatError, match=r"tensor 'score.weight' is not selected"):
        read_adapter(tmp_path, load_checkpoint(saved / "model").spec, supported_features=FEATURES)


def test_scores_beyond_float32_end_their_own_request(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / "classes" / "adapter_model.safetensors")
    # Rows of a Hadamard matrix: whatever the hidden state x is, one of the scores is at least 3e38 |x|.
    hadamard = reduce(np.kron, [np.array([[1, 1], [1, -1]], np.float32)] * 6)
    tensors["base_model.model.score.weight"] = np.float32(3e38) * hadamard[:, :40]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((saved / "classes" / "adapter_config.json").read_bytes())
    with LLM(saved / "model", CONFIG) as llm, pytest.raises(AdapterOverflow, match="not a finite number"):
        scores(llm, [[5, 6]], tmp_path)
