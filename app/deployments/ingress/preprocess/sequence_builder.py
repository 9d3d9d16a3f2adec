"""Builder of a request's sequences (`GenerateRequest`), with checks against the limits.

Errors name the field as the client called it. A request without a seed gets one here, once, so that it can be
recomputed anywhere with the same result.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.config import LimitsConfig
from app.deployments.ingress.preprocess.adapter_defaults import AdapterDefaults
from app.deployments.ingress.preprocess.structured_output import RequestedGrammar
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import SamplingFields
from app.engine.adapters.card import AdapterRef
from app.engine.errors import ContextOverflow, InvalidRequest
from app.engine.request import GenerateRequest, SamplingParams

#: Log-probabilities of one answer that is not a stream: 80 bytes of JSON each, and more in memory.
MAX_LOGPROBS = 524_288


class FieldNames(NamedTuple):
    """The client's names for fields, used in errors."""

    prompt: str
    limit: str
    logprobs: str
    num_answers: str = "n"


class TokenLimit(NamedTuple):
    """The most tokens of an answer: as the client has requested, and the route's default; None: the rest of the
    context."""

    requested: int | None
    default: int | None = None


class RequestIds(NamedTuple):
    """A request's id as its client sees it, and a unique one."""

    public: str
    unique: str


class SequenceBuilder:
    """One per ingress process. `limits` and `max_model_len` (longest prompt plus answer, in tokens) are read for each
    request, because they may change."""

    def __init__(
        self,
        tokenizer: Callable[[AdapterRef | None], TokenizerService],
        limits: Callable[[], LimitsConfig],
        max_model_len: Callable[[], int],
        needs_adapter: Callable[[AdapterRef | None, Sequence[Sequence[int]]], list[bool]],
        defaults: Callable[[AdapterRef | None], AdapterDefaults],
    ) -> None:
        """tokenizer: with an adapter's added tokens. needs_adapter: for each prompt whether it needs its adapter.
        defaults: an adapter's values for fields that a request leaves out."""
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._needs_adapter = needs_adapter
        self._limits = limits
        self._max_model_len = max_model_len

    def build(
        self,
        ids: RequestIds,
        caller: Principal,
        arrival_s: float,
        fields: SamplingFields,
        prompts: Sequence[Sequence[int]],
        refs: Sequence[AdapterRef | None],
        limit: TokenLimit,
        num_logprobs: int | None,
        prompt_logprobs: int | None,
        names: FieldNames,
        requested: RequestedGrammar | None,
        prediction: tuple[int, ...],
        *,
        is_stream: bool,
    ) -> tuple[GenerateRequest, ...]:
        """`fields.n` sequences for each prompt, with its adapter of `refs`, whose defaults replace missing fields.

        Raises InvalidRequest, ContextOverflow.
        """
        self._check_sizes(len(prompts), fields, num_logprobs, names)
        self._check_max_logprobs(prompt_logprobs, "prompt_logprobs")
        seed = secrets.randbits(63) if fields.seed is None else fields.seed
        # Equal prompts get different answers without a seed; with one, each gets the answer it would get alone.
        seeds_per_prompt = fields.n if fields.seed is None else 0
        requests = []
        for prompt_index, (token_ids, ref) in enumerate(zip(prompts, refs, strict=True)):
            defaults, tokenizer = self._defaults(ref), self._tokenizer(ref)
            own_fields = defaults.apply(fields)
            max_new = self._room(token_ids, limit, defaults.max_tokens, names)
            per_prompt = 0 if prompt_logprobs is None else len(token_ids) * (1 + prompt_logprobs)
            per_token = 0 if num_logprobs is None or is_stream else 1 + num_logprobs
            if per_token and limit.requested is None:  # the rest of the context is more than the client asked for
                room = MAX_LOGPROBS // (len(prompts) * fields.n) - per_prompt
                max_new = min(max_new, max(1, room // per_token))
            per_answer = max_new * per_token
            _check_num_logprobs(len(prompts) * fields.n * (per_answer + per_prompt), names)
            (is_needed,) = self._needs_adapter(ref, [token_ids])
            prompt = tuple(token_ids)
            for copy in range(fields.n):
                of_answer = derived_seed(seed, prompt_index * seeds_per_prompt + copy)
                request = GenerateRequest(
                    request_id=f"{ids.unique}-{prompt_index * fields.n + copy}",
                    tenant_id=caller.tenant_id,
                    token_ids=prompt,
                    sampling=self._sampling(
                        tokenizer,
                        own_fields,
                        defaults.eos_token_ids,
                        max_new,
                        of_answer,
                        num_logprobs,
                        prompt_logprobs,
                        requested,
                    ),
                    adapter=ref if is_needed else None,
                    unactivated=None if is_needed else ref,
                    weight=caller.tenant.weight,
                    cache_salt=caller.tenant.salt,
                    arrival_s=arrival_s,
                    key_id=caller.key_id,
                    is_batch=caller.is_batch,
                    prediction_ids=prediction,
                )
                requests.append(request)
        return tuple(requests)

    def _check_sizes(
        self, num_prompts: int, fields: SamplingFields, num_logprobs: int | None, names: FieldNames
    ) -> None:
        self.check_sequences(num_prompts, fields.n, names)
        if len(fields.stop_strings) > self._limits().max_stop_strings:
            raise InvalidRequest(
                f"{len(fields.stop_strings)} stop strings exceed limits.max_stop_strings "
                f"{self._limits().max_stop_strings}",
                param="stop",
            )
        self._check_max_logprobs(num_logprobs, names.logprobs)

    def _check_max_logprobs(self, number: int | None, param: str) -> None:
        if number is not None and number > self._limits().max_logprobs:
            raise InvalidRequest(
                f"{number} logprobs per token exceed limits.max_logprobs {self._limits().max_logprobs}", param=param
            )

    def _room(self, token_ids: Sequence[int], limit: TokenLimit, default: int | None, names: FieldNames) -> int:
        """Tokens that may be generated; the rest of the context if nothing sets a limit. An adapter's `default` is cut
        to that rest."""
        num_prompt, max_model_len = len(token_ids), self._max_model_len()
        max_tokens = limit.default if limit.requested is None else limit.requested
        if limit.requested is None and default is not None:
            max_tokens = min(default, max(1, max_model_len - num_prompt))
        if not num_prompt:
            raise InvalidRequest("the prompt has no tokens; at least one is needed", param=names.prompt)
        min_new = 1 if max_tokens is None else max_tokens
        if num_prompt + min_new > max_model_len:
            raise ContextOverflow(
                f"the prompt has {num_prompt} tokens and {min_new} more are requested, {num_prompt + min_new} in "
                f"total, but the context holds {max_model_len}; shorten the prompt or lower {names.limit}",
                param=names.prompt if num_prompt >= max_model_len else names.limit,
            )
        return max_model_len - num_prompt if max_tokens is None else max_tokens

    def check_sequences(self, num_prompts: int, num_per_prompt: int, names: FieldNames) -> None:
        """Raises InvalidRequest for no prompt, or more sequences than `limits.max_sequences`."""
        if num_prompts < 1:
            raise InvalidRequest("the request has no prompt", param=names.prompt)
        if num_prompts * num_per_prompt > self._limits().max_sequences:
            raise InvalidRequest(
                f"prompts times n is {num_prompts * num_per_prompt} but limits.max_sequences is "
                f"{self._limits().max_sequences}; send several requests",
                param=names.prompt if num_per_prompt == 1 else names.num_answers,
            )

    def _sampling(
        self,
        tokenizer: TokenizerService,
        fields: SamplingFields,
        eos_token_ids: tuple[int, ...] | None,
        max_tokens: int,
        seed: int,
        num_logprobs: int | None,
        prompt_logprobs: int | None,
        requested: RequestedGrammar | None,
    ) -> SamplingParams:
        _check_grammar_fields(fields, requested)
        for token_id, _ in fields.biases:
            if token_id >= tokenizer.vocab_size:
                raise InvalidRequest(
                    f"logit_bias has token id {token_id} but the vocabulary ends at {tokenizer.vocab_size - 1}",
                    param="logit_bias",
                )
        if fields.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {fields.min_tokens} but at most {max_tokens} may be generated", param="min_tokens"
            )
        is_greedy = fields.top_p == 0  # the smallest set with any probability: the most likely token
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=fields.temperature,
            top_p=1.0 if is_greedy else fields.top_p,
            top_k=1 if is_greedy else max(fields.top_k, 0),
            min_p=fields.min_p,
            seed=seed,
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            ignore_eos=fields.ignore_eos,
            eos_token_ids=eos_token_ids if requested is None else tokenizer.grammar_ends(eos_token_ids),
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            repetition_penalty=fields.repetition_penalty,
            num_logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=fields.biases,
            min_tokens=fields.min_tokens,
            grammar="" if requested is None else requested.grammar,
            grammar_prefix="" if requested is None else requested.prefix,
            grammar_tokens="" if requested is None else tokenizer.grammar_tokens,
        )


def _check_num_logprobs(number: int, names: FieldNames) -> None:
    """Raises InvalidRequest for more than `MAX_LOGPROBS`."""
    if number > MAX_LOGPROBS:
        raise InvalidRequest(
            f"answers times tokens times (1 + {names.logprobs}) is up to {number}; at most {MAX_LOGPROBS} "
            f"log-probabilities are returned at once: lower {names.limit}, {names.num_answers} or {names.logprobs}, "
            "or set stream",
            param=names.logprobs,
        )


def _check_grammar_fields(fields: SamplingFields, requested: RequestedGrammar | None) -> None:
    if requested is not None and (fields.ignore_eos or fields.min_tokens):
        name = "ignore_eos" if fields.ignore_eos else "min_tokens"
        raise InvalidRequest(
            f"{name} cannot be combined with a grammar, which determines where the answer ends", param=name
        )


def request_ids(prefix: str, client_id: str | None) -> RequestIds:
    """The ids of a request; `client_id` is the client's own."""
    if client_id is None:
        request_id = f"{prefix}-{secrets.token_hex(12)}"
        return RequestIds(request_id, request_id)
    return RequestIds(f"{prefix}-{client_id}", f"{prefix}-{client_id}.{secrets.token_hex(8)}")


def derived_seed(seed: int, copy: int) -> int:
    """The seed of the n-th answer: the request's own for the first, then a splitmix64 sequence from it."""
    seed &= 2**64 - 1
    if copy == 0:
        return seed
    mixed = (seed + copy * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return mixed ^ (mixed >> 31)
