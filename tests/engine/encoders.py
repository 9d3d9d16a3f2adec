"""Tiny random encoders of each kind and adapters for them, written by transformers and PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.warning import PeftWarning
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

_SIZES = {
    "vocab_size": 99,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "type_vocab_size": 2,
}
MODELS = {
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "camembert": "CamembertModel",
}


def tiny_encoder(kind: str, **sizes: int) -> Any:
    """A float32 model of these sizes with fresh random weights, biases and norms included, in evaluation mode."""
    name = MODELS[kind].removesuffix("Model")
    padding = {"pad_token_id": 0} if kind == "bert" else {"pad_token_id": 1}
    config = getattr(transformers, f"{name}Config")(**_SIZES | sizes, **padding, attn_implementation="eager")
    model = getattr(transformers, f"{name}Model")(config).float().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            centre = 1.0 if path.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(centre + torch.randn_like(parameter) * 0.15)
    return model


def save_encoder(model: Any, folder: Path) -> Path:
    """The model, with a tokenizer of the letters a to z and of words that begin with them."""
    model.save_pretrained(folder)
    letters = [chr(97 + index) for index in range(26)]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    backend = tokenizers.Tokenizer(WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]"))
    backend.pre_tokenizer = BertPreTokenizer()
    backend.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def save_adapter(model: Any, folder: Path, **settings: Any) -> Path:
    """A random adapter of task FEATURE_EXTRACTION; the model is as it was afterwards."""
    adapted = get_peft_model(model, LoraConfig(task_type="FEATURE_EXTRACTION", **settings))
    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if "lora_" in path:
                scale = 0.02 if "magnitude" in path else 0.2
                parameter.add_(torch.randn_like(parameter) * scale)
    with warnings.catch_warnings():  # PEFT 0.21 takes a trained bias for a damaged matrix
        warnings.simplefilter("ignore", PeftWarning)
        adapted.save_pretrained(str(folder))
    adapted.unload()
    return folder


def reference_embedding(model: Any, adapter: Path | None, token_ids: list[int], method: str) -> np.ndarray:
    """transformers' and PEFT's, divided by its length."""
    adapted = PeftModel.from_pretrained(model, str(adapter)).eval() if adapter is not None else None
    with torch.no_grad():
        output = (adapted or model)(input_ids=torch.tensor([token_ids]))
    states = output.last_hidden_state[0].double().numpy()
    if adapted is not None:
        adapted.unload()
    vector = {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[method]
    return np.asarray(vector / np.linalg.norm(vector))
