"""Score heads: the trained last layers of adapters that classify or rank (PEFT's task type SEQ_CLS).

They are computed here, from the hidden state of the pooled token, as transformers' `LlamaForSequenceClassification` and
its kin do for decoders (`score`, last token) and `RobertaForSequenceClassification` for encoders (`classifier`, first
token). A BERT classifier also needs the base's pooler, which no embedding depends on and no engine holds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.raw_adapter import RawTensor
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterTooLarge
from app.engine.models.spec import ModelSpec, Pooling

#: Most labels of a head: each is a product with the hidden state, computed between two steps.
MAX_LABELS = 1024
#: Modules that PEFT trains whole for SEQ_CLS, whether or not `modules_to_save` names them.
HEAD_MODULES = ("classifier", "score")
_DECODER_HEAD = ("score.weight",)
_ENCODER_HEAD = ("classifier.dense.weight", "classifier.dense.bias", "classifier.out_proj.weight",
                 "classifier.out_proj.bias")  # fmt: skip


def head_names(spec: ModelSpec | None) -> tuple[str, ...]:
    """The tensors of a head on this base; of any head if the base is unknown. AdapterMismatch for a BERT."""
    if spec is None:
        return (*_DECODER_HEAD, *_ENCODER_HEAD)
    if spec.family == "bert":
        raise AdapterMismatch(
            f"a classifier on '{spec.name}' also needs the pooler of BERT, which is not served; train it on a "
            "RoBERTa or on a decoder"
        )
    return _DECODER_HEAD if spec.encoder is None else _ENCODER_HEAD


def is_head(name: str) -> bool:
    """Whether a tensor's name is one of a head."""
    return name in _DECODER_HEAD or name in _ENCODER_HEAD


def check_head(name: str, tensor: RawTensor, spec: ModelSpec) -> None:
    """Raise AdapterMismatch or AdapterTooLarge for a tensor of a head that does not fit the base."""
    if name not in head_names(spec):
        raise AdapterMismatch(f"'{name}' is not the head of a classifier on '{spec.name}'")
    num_labels = tensor.shape[0] if tensor.shape else 0
    if num_labels > MAX_LABELS and not name.startswith("classifier.dense."):
        raise AdapterTooLarge(f"'{name}' has {num_labels} labels, but at most {MAX_LABELS} are served")
    hidden = spec.hidden_size
    rows = (hidden,) if name.startswith("classifier.dense.") else (num_labels,)
    expected = rows if name.endswith(".bias") else (*rows, hidden)
    if tensor.shape != expected or not num_labels:
        raise AdapterMismatch(
            f"'{name}' is {list(tensor.shape)} but '{spec.name}' has hidden states of {hidden}; the adapter was "
            "trained on another model"
        )


def check_whole(names: set[str], spec: ModelSpec) -> None:
    """Raise AdapterFormatError for a head of which tensors are missing."""
    found = {name for name in names if is_head(name)}
    missing = sorted(set(head_names(spec)) - found) if found else []
    if missing:
        raise AdapterFormatError(f"the adapter's head has no '{missing[0]}'; save it whole")


def num_labels(adapter: LoraAdapter | None) -> int:
    """The numbers that the adapter's head computes for a text; 0 without a head."""
    if adapter is None:
        return 0
    head = next((adapter.replaced[name] for name in (*_DECODER_HEAD, _ENCODER_HEAD[2]) if name in adapter.replaced), ())
    return len(head)


def pooling_of(spec: ModelSpec) -> Pooling:
    """The token whose hidden state a head reads."""
    return "last" if spec.encoder is None else "cls"


def logits(adapter: LoraAdapter, state: NDArray[np.float64]) -> NDArray[np.float64]:
    """The head's numbers [labels] for a hidden state [H]: sums in float64, each of its own."""
    head = adapter.replaced
    if _DECODER_HEAD[0] in head:
        return _times(head[_DECODER_HEAD[0]], state)
    dense, dense_bias, out, out_bias = (head[name] for name in _ENCODER_HEAD)
    numbers: NDArray[np.float64] = _times(out, np.tanh(_times(dense, state) + dense_bias)) + out_bias
    return numbers


def _times(matrix: NDArray[np.float32], vector: NDArray[np.float64]) -> NDArray[np.float64]:
    products: NDArray[np.float64] = matrix * vector
    sums: NDArray[np.float64] = products.sum(axis=1)
    return sums
