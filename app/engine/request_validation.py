"""Validation: whether this engine can compute a request as written, with the adapter that comes with it.

It checks ranges of sampling parameters, token ids, lengths, and adapters that do not fit empty tables; an error names
the field, the value and the limit. It runs in the caller's thread, so the engine's thread only sees valid requests.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from app.engine.adapters import score_head
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.backend import BackendLimits
from app.engine.errors import AdapterMismatch, ContextOverflow, InvalidRequest, MergedAdapterOnly, UnsupportedField
from app.engine.models.spec import ModelSpec
from app.engine.pools.table_limits import TableLimits
from app.engine.request import GenerateRequest, PoolingParams, SamplingParams

MAX_LOGPROBS = 20
#: The lowest temperature that is not greedy: its reciprocal, and logits times that, must be float32s.
MIN_TEMPERATURE = 1e-30
MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1024


class RequestValidator:
    """The checks of one engine. `merged`: the adapter that is part of the weights and the only one served."""

    def __init__(
        self,
        spec: ModelSpec,
        tables: TableLimits,
        limits: BackendLimits,
        merged: AdapterCard | None,
        max_model_len: int,
        *,
        has_grammars: bool,
    ) -> None:
        self._spec, self._tables, self._limits, self._merged = spec, tables, limits, merged
        self._max_model_len = max_model_len
        self._has_grammars = has_grammars

    def request(self, request: GenerateRequest, adapter: LoraAdapter | None) -> None:
        """Raises InvalidRequest (ContextOverflow), UnsupportedField, MergedAdapterOnly, and what `adapter` raises."""
        capacity = self._limits.num_kv_blocks * self._limits.block_size
        resized = 0 if adapter is None else adapter.card.vocab_size
        spec = replace(self._spec, vocab_size=resized) if resized else self._spec
        validate_request(request, spec, self._max_model_len, capacity)
        if request.pooling is not None and not self._limits.can_embed:
            raise UnsupportedField("this engine cannot compute embeddings; use engine.cpu", param="pooling")
        _check_task(request, adapter)
        if request.sampling.grammar and not self._has_grammars:
            raise UnsupportedField("this engine has no structured outputs", param="structured_outputs")
        ref = request.adapter
        if self._merged is not None:
            self._check_merged(self._merged, ref)
        elif ref is not None and adapter is not None and ref.digest == adapter.card.digest:
            self.adapter(adapter, ref.name)
        elif ref is not None or adapter is not None:
            named = ref.digest if ref is not None else "none"
            weights = adapter.card.digest if adapter is not None else "none"
            raise InvalidRequest(
                f"the request names adapter digest {named} but the weights given are {weights}", param="adapter"
            )

    def adapter(self, adapter: LoraAdapter, name: str) -> None:
        """Raises AdapterMismatch, AdapterTooLarge, MergedAdapterOnly."""
        card = adapter.card
        if self._merged is not None:
            self._check_merged(self._merged, AdapterRef(name, card.digest, ""))
            return
        if card.base_digest != self._spec.digest:
            raise AdapterMismatch(
                f"adapter {name!r} was read for base model {card.base_digest} "
                f"but this engine serves {self._spec.digest}; register it for this base"
            )
        self._tables.check_rows(name, self._limits.rank_rows_of(adapter))
        self._tables.check_extras(name, self._limits.extra_bytes_of(adapter))

    @staticmethod
    def _check_merged(merged: AdapterCard, ref: AdapterRef | None) -> None:
        if ref is None or ref.digest != merged.digest:
            requested = "the base model" if ref is None else f"adapter {ref.name!r}"
            raise MergedAdapterOnly(
                f"the request is for {requested}, but this engine serves only the adapter with digest "
                f"{merged.digest[:12]}…, which engine.merged_adapter has merged into its weights; use a service "
                "without engine.merged_adapter"
            )


def validate_sampling(params: SamplingParams, spec: ModelSpec) -> None:
    """Raise InvalidRequest for a parameter outside its range."""
    _integer("max_tokens", params.max_tokens, 0 if params.prompt_logprobs is not None else 1, None)
    _number("temperature", params.temperature, 0.0, 100.0)
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"temperature is {params.temperature} but must be 0 (greedy) or at least {MIN_TEMPERATURE}",
            param="temperature",
        )
    _number("top_p", params.top_p, 0.0, 1.0)
    if params.top_p == 0:
        raise InvalidRequest(
            "top_p is 0 but must be above 0 and at most 1; use temperature 0 for greedy", param="top_p"
        )
    _integer("top_k", params.top_k, 0, (1 << 31) - 1)
    _number("min_p", params.min_p, 0.0, 1.0)
    _integer("seed", params.seed, 0, (1 << 64) - 1)
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _number("repetition_penalty", params.repetition_penalty, 0.01, 100.0)
    if params.num_logprobs is not None:
        _integer("num_logprobs", params.num_logprobs, 0, min(MAX_LOGPROBS, spec.vocab_size))
    if params.prompt_logprobs is not None:
        _integer("prompt_logprobs", params.prompt_logprobs, 0, min(MAX_LOGPROBS, spec.vocab_size))
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(params.stop_token_ids)} entries but at most {MAX_STOP_TOKEN_IDS} are allowed",
            param="stop_token_ids",
        )
    for token_id in params.stop_token_ids:
        _integer("stop_token_ids", token_id, 0, spec.vocab_size - 1)
    for token_id in params.eos_token_ids or ():
        _integer("eos_token_ids", token_id, 0, spec.vocab_size - 1)
    _integer("min_tokens", params.min_tokens, 0, params.max_tokens)
    if len(params.logit_bias) > MAX_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(params.logit_bias)} entries but at most {MAX_BIASES} are allowed", param="logit_bias"
        )
    for token_id, amount in params.logit_bias:
        _integer("logit_bias", token_id, 0, spec.vocab_size - 1)
        _number("logit_bias", amount, -100.0, 100.0)
    if params.grammar and (params.ignore_eos or params.min_tokens):
        name = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise InvalidRequest(
            f"{name} cannot be combined with a grammar, which decides where the answer ends", param=name
        )


def validate_request(request: GenerateRequest, spec: ModelSpec, max_model_len: int, kv_capacity: int) -> None:
    """Raise InvalidRequest or ContextOverflow for a request that can never be computed.

    `kv_capacity`: the tokens that all KV blocks together hold.
    """
    if request.pooling is None:
        if spec.encoder is not None:
            raise InvalidRequest(f"{spec.name!r} is an encoder: it computes embeddings, not text", param="model")
        validate_sampling(request.sampling, spec)
    else:
        _check_pooling(request.pooling, spec)
    if not request.token_ids:
        raise InvalidRequest("the prompt has no tokens but at least one is needed", param="token_ids")
    for name, token_ids in (
        ("token_ids", request.token_ids),
        ("resume_token_ids", request.resume_token_ids),
        ("prediction_ids", request.prediction_ids),
    ):
        _check_token_ids(name, token_ids, spec.vocab_size)
    if not 0 < request.weight <= sys.float_info.max:  # NaN fails the comparison
        raise InvalidRequest(f"weight is {request.weight} but must be a finite number above 0", param="weight")
    num_prompt = len(request.token_ids)
    if request.pooling is not None:
        if request.resume_token_ids:
            raise InvalidRequest("resume_token_ids cannot be combined with pooling", param="resume_token_ids")
        _check_text(num_prompt, max_model_len, kv_capacity if spec.encoder is None else max_model_len)
        return
    max_tokens = request.sampling.max_tokens
    if len(request.resume_token_ids) > max_tokens:
        raise InvalidRequest(
            f"resume_token_ids has {len(request.resume_token_ids)} tokens but max_tokens is {max_tokens}",
            param="resume_token_ids",
        )
    if num_prompt + max_tokens > max_model_len:
        raise ContextOverflow(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together {num_prompt + max_tokens}, "
            f"but the context holds {max_model_len}; shorten the prompt or lower max_tokens",
            param="max_tokens" if num_prompt < max_model_len else "token_ids",
        )
    if num_prompt + max(max_tokens, 1) - 1 > kv_capacity:
        raise ContextOverflow(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together {num_prompt + max_tokens}, "
            f"but the KV memory holds {kv_capacity}; shorten the request or raise engine.num_kv_blocks",
            param="max_tokens" if num_prompt < kv_capacity else "token_ids",
        )


def _check_text(num_tokens: int, max_model_len: int, kv_capacity: int) -> None:
    """Raise ContextOverflow for a text that is too long to be embedded."""
    for limit, what in ((max_model_len, "the context"), (kv_capacity, "the KV memory")):
        if num_tokens > limit:
            raise ContextOverflow(
                f"the text has {num_tokens} tokens but {what} holds {limit}; embed it in parts", param="token_ids"
            )


def _check_task(request: GenerateRequest, adapter: LoraAdapter | None) -> None:
    """Only an adapter with a score head computes scores, and it computes nothing else. Raises InvalidRequest."""
    ref, task = request.adapter, None if request.pooling is None else request.pooling.task
    name, num_labels = "the base model" if ref is None else f"adapter {ref.name!r}", score_head.num_labels(adapter)
    if task in (None, "embed") and num_labels:
        what = "generates no text" if task is None else "computes no embeddings"
        raise InvalidRequest(
            f"{name} has a score head (SEQ_CLS) and {what}; use POST /v1/score, /v1/rerank or /v1/classify",
            param="model",
        )
    if task in ("classify", "score") and not num_labels:
        raise InvalidRequest(
            f"{name} has no score head; name an adapter of task type SEQ_CLS, or use POST /v1/chat/completions or "
            "/v1/embeddings",
            param="model",
        )
    if task == "score" and num_labels > 1:
        raise InvalidRequest(
            f"{name} has {num_labels} labels and no single score; use POST /v1/classify", param="model"
        )


def _check_pooling(pooling: PoolingParams, spec: ModelSpec) -> None:
    methods = ("last", "mean") if spec.encoder is None else ("last", "mean", "cls")
    if pooling.method not in methods:
        known = " and ".join(map(repr, methods))
        raise InvalidRequest(f"pooling is {pooling.method!r} but {spec.name!r} supports {known}", param="pooling")
    if pooling.task != "embed":
        if pooling.num_dimensions is not None:
            raise InvalidRequest("dimensions are for embeddings; scores have none", param="dimensions")
        if pooling.method != score_head.pooling_of(spec):
            raise InvalidRequest(
                f"pooling is {pooling.method!r} but a score head reads {score_head.pooling_of(spec)!r}", param="pooling"
            )
    if pooling.num_dimensions is not None:
        _integer("dimensions", pooling.num_dimensions, 1, spec.hidden_size)


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {value!r} but must be an integer {limit}", param=name)


def _number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]  # NaN fails the comparison
        raise InvalidRequest(f"{name} is {value!r} but must be a number from {low} to {high}", param=name)


def _check_token_ids(name: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    try:
        array = np.array(token_ids)
    except ValueError:  # tuples among them
        array = np.empty(0)
    if array.ndim == 1 and array.dtype.kind in "iu" and array.min() >= 0 and array.max() < vocab_size:
        return
    for token_id in token_ids:  # slower, to name the offending id
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name} contains {token_id!r} but token ids of this model are integers from 0 to {vocab_size - 1}",
                param=name,
            )
