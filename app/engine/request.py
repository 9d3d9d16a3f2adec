"""What enters the engine and what comes back: frozen value types, and named tuples where one is made for each token,
because a frozen dataclass takes ten times as long to make.

A `GenerateRequest` has token ids, never text; each step returns at most one `TokenChunk` per request. A request's
tokens are a function of (weights, adapter, prompt, sampling): nothing else in these types may influence them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.engine.adapters.card import AdapterRef
from app.engine.models.spec import Pooling
from app.engine.wire_format import message

FinishReason = Literal["stop", "length", "abort", "error"]
PoolingTask = Literal["embed", "classify", "score"]


@message
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated by `validate_sampling`.

    temperature 0 is greedy. `seed` and the token's position key the counter-based generator, so equal seeds give equal
    tokens in any batch. `num_logprobs`: None for none, 0 for the chosen token's, n for the n most likely tokens' as
    well. Penalties follow OpenAI (presence, frequency: over generated tokens) and transformers (repetition: over prompt
    and generated tokens); 0, 0 and 1 switch them off. `logit_bias`: (token id, amount) pairs, added after the
    penalties. Tokens that end the answer are forbidden before `min_tokens` tokens are generated. `grammar` is the text
    of a grammar that the answer follows (`app.engine.structured_output.grammar_builder`), "" for none; its text begins
    with `grammar_prefix`, which the prompt ends with, and the answer is the rest. `prompt_logprobs`:
    like `num_logprobs`, for the prompt's own tokens; with a `max_tokens` of 0 they are all that is computed.
    `eos_token_ids`: the ids that end the answer unless `ignore_eos`, which an adapter may have of its own; None: the
    model's. With a grammar they are special tokens. `grammar_tokens`: the tokens that an adapter adds to the grammar's
    vocabulary, as an `AdapterTokenizer` in JSON; "" for none.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    num_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: str = ""
    grammar_prefix: str = ""
    prompt_logprobs: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    grammar_tokens: str = ""


@message
@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a sequence's hidden states, after the last norm, become one vector. Validated by `validate_request`.

    "embed": a vector of length 1. "classify": the numbers of the adapter's score head, before softmax or sigmoid;
    "score": the same, for a head with one. `num_dimensions` keeps the first numbers only; None keeps all. "cls" is for
    encoders alone: a decoder's first token has seen no other.
    """

    method: Pooling = "last"
    num_dimensions: int | None = None
    task: PoolingTask = "embed"


@message
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate or, with `pooling`, to embed; then `sampling` is not read and nothing is resumed.

    `resume_token_ids` are tokens that another engine has already produced for this request: they count as output
    (against max_tokens and penalties) and are not sent again. `cache_salt` separates cached prefixes, besides the
    adapter's digest; the server derives it. `weight` is the tenant's weight in the fair queue. `num_failures`: engines
    that failed in a step with this request. `key_id` is the API key that pays, empty for requests without one; None:
    the sender counts the usage. `num_charged` of the resumed tokens, and with them the prompt, are charged already;
    None: nothing is. `prediction_ids` are the answer that the client expects: they speed it up where they are right and
    never change it. `is_batch`: computed after all interactive requests. `unactivated`: the requested adapter where it
    changes nothing because the prompt does not contain its invocation (`app.engine.adapters.card`); then `adapter` is
    None, the base model computes, and the usage is the adapter's.
    """

    request_id: str
    tenant_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterRef | None = None
    weight: float = 1.0
    cache_salt: bytes = b""
    arrival_s: float = 0.0
    resume_token_ids: tuple[int, ...] = ()
    num_failures: int = 0
    pooling: PoolingParams | None = None
    key_id: str | None = None
    num_charged: int | None = None
    prediction_ids: tuple[int, ...] = ()
    is_batch: bool = False
    unactivated: AdapterRef | None = None

    @property
    def requested_adapter(self) -> AdapterRef | None:
        """The adapter that the request names, activated or not; None: the base model."""
        return self.unactivated if self.adapter is None else self.adapter


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, from the model's distribution before temperature.

    `rank` of a prompt token: 1 for the most likely one; 0 for generated tokens.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class Usage(NamedTuple):
    """Token counts of one request. `cached_tokens` are prompt tokens whose K and V were found in the cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class RequestUsage(NamedTuple):
    """The resources that one engine has spent on a request, known when the request has ended there.

    The counts include tokens resumed from another engine, unless they are charged (`num_charged`). `rank_row_ms`,
    `kv_block_ms`: rows and blocks referenced, times milliseconds; shared ones count for each request. `num_loads`,
    `load_bytes`: adapter writes to the device that this request caused.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_loads: int = 0
    load_bytes: int = 0
    rank_row_ms: int = 0
    kv_block_ms: int = 0


class RequestTiming(NamedTuple):
    """Where a request's time went in one replica so far, in whole microseconds and in this order, for traces.

    `fetch_us`: until its adapter was in the replica's host memory. `queue_us`: until its first step. `write_us`: the
    write of its adapter to the device, if this request caused it. `prefill_us`: until its first token. `decode_us`:
    until its last one.
    """

    fetch_us: int = 0
    queue_us: int = 0
    write_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0


class TokenChunk(NamedTuple):
    """The output of one step for one request. The last chunk of a request has `finish_reason` set.

    `usage` is set in the first and the last chunk with tokens, so a client that stops early knows the cost so far.
    `matched_stop` is the stop or end-of-sequence token that ended the request; it is the last of `token_ids`, and the
    text layer hides it. `error` is set only with finish_reason "error". `embedding` is the result of a request with
    `pooling`, as little-endian float32; its finish_reason is "stop". `request_usage` is set in the last chunk unless
    the engine failed: then the engine that resumes the request counts all of it. `prompt_logprobs` of the prompt's
    tokens but the first are in the first chunk with tokens, or in the last one. `timing` comes with `usage`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    usage: Usage | None = None
    error: Exception | None = None
    embedding: bytes = b""
    request_usage: RequestUsage | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    timing: RequestTiming | None = None

    @property
    def is_billed(self) -> bool:
        """Whether the engine has computed tokens for the request that it counts."""
        used = self.request_usage
        return used is not None and (used.prompt_tokens > 0 or used.completion_tokens > 0)
