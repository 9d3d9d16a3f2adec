"""What enters the engine and what comes back: frozen value types.

In: a `GenerateRequest` (token ids, never text). Out: `TokenChunk`s, one per engine step and
request at most. A request's tokens are a function of (weights, adapter, prompt, sampling): nothing
else in these types may influence them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from app.engine.adapters.card import AdapterRef
from app.engine.models.spec import Pooling
from app.engine.wire_format import message

FinishReason = Literal["stop", "length", "abort", "error"]


@message
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    temperature 0 is greedy. `seed` keys the counter-based generator together with the token's
    position, so equal seeds give equal tokens in any company. `num_logprobs` None: none wanted;
    0: only the chosen token's; n: also the n most likely tokens'. Penalties follow OpenAI
    (presence, frequency: over generated tokens) and transformers (repetition: over prompt and
    generated tokens); 0, 0 and 1 switch them off. `logit_bias`: (token id, amount) pairs, added after penalties. Before
    `min_tokens` tokens are generated none is drawn that ends the answer. `grammar` is what the answer follows, as text
    (`app.engine.structured_output.grammar_builder`), "" for none. Validated by `validate_sampling`.
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


@message
@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a sequence's hidden states, behind the last norm, become one vector.

    `num_dimensions`: only so many of its first numbers, None for all. The vector is divided by its length then.
    "cls" is for encoders alone: a decoder's first token has seen nothing else. Validated by `validate_request`.
    """

    method: Pooling = "last"
    num_dimensions: int | None = None


@message
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate, or, with `pooling`, one to embed: then `sampling` is not read and nothing is resumed.

    `resume_token_ids` are tokens this request has already produced elsewhere: they are treated as
    generated output (they count against max_tokens and penalties) and are not sent again.
    `cache_salt` keys the prefix cache beside the adapter digest; it is derived by the server.
    `weight` is the tenant's share in fair queueing. `num_failures` engines have failed in a step that computed it.
    `key_id` is the API key that pays, empty for requests without one; None: whoever sends the request counts it.
    `num_charged` of the resumed tokens are charged already, and so is the prompt; None: nothing is.
    `prediction_ids` are what the client expects as the answer: where they are right it comes sooner, and
    they change nothing of it.
    `is_batch`: nobody waits for it; it is computed after everything that somebody waits for.
    `unactivated`: the adapter that was asked for where it changes nothing, because the prompt has not its invocation
    (`app.engine.adapters.card`): the base computes, `adapter` is None, and what it takes is the adapter's.
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
        """The adapter that its sender named, whether or not anything is computed with it; None: the base."""
        return self.unactivated if self.adapter is None else self.adapter


@message
@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, from the model's distribution before temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@message
@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` are prompt tokens whose KV was found in the cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@message
class RequestUsage(NamedTuple):
    """What an engine has spent on one request, told when the request has ended there.

    Of a request that goes on from another engine's tokens they count too, unless they are charged (`num_charged`).
    `rank_row_ms`, `kv_block_ms`: rows and blocks it referred to, times milliseconds; what several requests share counts
    for each of them. Loads are those of adapter rows to the device that this request caused.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_loads: int = 0
    load_bytes: int = 0
    rank_row_ms: int = 0
    kv_block_ms: int = 0


@message
@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one step produced for one request. The last chunk of a request has `finish_reason` set.

    The first and the last with tokens have `usage`: whoever has enough of an answer knows its cost so far.
    `matched_stop` is the stop or end-of-sequence token id that ended it (that id is the last of
    `token_ids`; the text layer hides it). `error` is set only with finish_reason "error". `embedding` is what a request
    with `pooling` ends with, as little-endian float32; its finish_reason is "stop". `request_usage` comes with the last
    chunk, unless the engine failed: then whoever goes on with the request counts all of it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    usage: Usage | None = None
    error: Exception | None = field(default=None, compare=False)
    embedding: bytes = b""
    request_usage: RequestUsage | None = None
