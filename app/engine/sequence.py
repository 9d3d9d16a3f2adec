"""The running state of a request in the engine: the one mutable object per request.

It owns the token ids, the number of them that have K and V in memory, and the blocks and the adapter slot it holds. The
first `num_computed` tokens are in the blocks of `block_table`, in order; a sequence that is not running holds no block
and no rows. The scheduler decides when and how much to compute.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import invocation_start
from app.engine.batch import Bias
from app.engine.constraint import Constraint
from app.engine.models.spec import ModelSpec
from app.engine.pools.block_pool import activation_hash, block_hash, root_hash
from app.engine.request import FinishReason, GenerateRequest, RequestTiming, RequestUsage, TokenLogprobs, Usage

#: Draft tokens of a sequence's first draft, and of any.
FIRST_DRAFT_LENGTH, MAX_DRAFT_LENGTH = 3, 7
#: The longest pause between drafts, in steps.
MAX_PAUSE = 128


class Status(Enum):
    """Where a sequence stands. A preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Running state of one request.

    `token_ids` [prompt + max_tokens] int32 holds prompt, resumed and generated ids, of which the first `num_tokens` are
    known; `num_given` of them came with the request. The next `num_draft_tokens` ids are the current step's draft
    tokens (`app.engine.spec_decode`), some from `prediction` [n] int32; none of them is in `end_ids`. `block_table`
    [blocks for all ids] int32; the first `num_blocks` count. `has_memory`: whether K and V are kept between steps (not
    for encoders). `pooled_sums` [H] float64: the sum of hidden states so far if it is embedded, else [0].

    `order` is the number of its first admission and survives preemption: the older of two sequences is never preempted
    for the younger. `bypassed` counts admissions of others while this one was first in fair order and had to wait. Its
    adapter needs `num_rank_rows_needed` and has `num_rank_rows` here. `block_seconds` and `row_seconds` are what it has
    held until `held_since_s`. `bias` is added to its logits, `stop_bias` instead until min_tokens. `constraint` is the
    grammar of a structured output, set before it is queued.

    `submitted_s`, `started_s`, `first_s`: the engine's clock at its submission, first step and first token, 0 before;
    `write_s`: seconds of the write of its adapter to the device.

    `prompt_logprobs` grow with the steps of its prompt if `wants_prompt_logprobs`: those of token 1 on.

    Activated LoRA: tokens before `adapter_start` are computed without the adapter, and blocks before `first_own_block`
    are the base's.
    """

    __slots__ = (
        "adapter", "adapter_digest", "adapter_slot", "adapter_start", "bias", "block_hashes", "block_seconds",
        "block_size", "block_table", "bypassed", "constraint", "draft_length", "end_ids", "extra_bytes",
        "first_own_block", "first_s", "forced_draft_length", "has_memory", "held_since_s", "load_bytes", "max_tokens",
        "ngram_draft_length", "num_blocks", "num_cached", "num_computed", "num_draft_tokens", "num_given", "num_loads",
        "num_prompt", "num_rank_rows", "num_rank_rows_needed", "num_tokens", "order", "pooled_sums", "pooling",
        "prediction", "prompt_logprobs", "rank", "request", "request_id", "root", "row_seconds", "started_s", "status",
        "stop_bias", "stop_ids", "submitted_s", "tenant_id", "token_ids", "wants_history", "wants_logprobs",
        "wants_prompt_logprobs", "write_s",
    )  # fmt: skip

    def __init__(self, request: GenerateRequest, adapter: LoraAdapter | None, spec: ModelSpec, block_size: int) -> None:
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.tenant_id = request.tenant_id
        self.adapter = adapter
        self.adapter_digest = adapter.card.digest if adapter is not None else None
        self.rank = adapter.card.max_rank if adapter is not None else 0
        self.num_rank_rows_needed, self.extra_bytes = self.rank, 0  # the engine sets what its device needs
        self.adapter_slot = 0
        self.status = Status.WAITING
        self.order: int | None = None
        self.bypassed = 0
        self.num_rank_rows = 0
        self.held_since_s = self.block_seconds = self.row_seconds = 0.0
        self.num_loads = self.load_bytes = 0
        self.submitted_s = self.started_s = self.first_s = self.write_s = 0.0

        self.num_prompt = len(request.token_ids)
        self.num_given = self.num_tokens = self.num_prompt + len(request.resume_token_ids)
        self.pooling = request.pooling
        self.pooled_sums: NDArray[np.float64] = np.zeros(0 if self.pooling is None else spec.hidden_size)
        self.max_tokens = sampling.max_tokens if self.pooling is None else 0
        capacity = max(self.num_prompt + self.max_tokens, self.num_tokens)
        self.token_ids: NDArray[np.int32] = np.empty(capacity, np.int32)
        self.token_ids[: self.num_prompt] = request.token_ids
        self.token_ids[self.num_prompt : self.num_tokens] = request.resume_token_ids
        self.num_computed = self.num_draft_tokens = 0
        self.num_cached: int | None = None
        self.prediction: NDArray[np.int32] = np.array(request.prediction_ids, np.int32)
        self.ngram_draft_length, self.forced_draft_length = DraftLength(), DraftLength()
        self.draft_length = self.ngram_draft_length

        self.has_memory = spec.encoder is None
        self.block_size = block_size
        self.block_table: NDArray[np.int32] = np.zeros(self.num_blocks_for(capacity), np.int32)
        self.num_blocks = 0
        self.adapter_start = 0
        self.first_own_block: int | None = None
        if adapter is not None and adapter.card.invocation_tokens:
            start = invocation_start(self.token_ids[: self.num_prompt], adapter.card.invocation_tokens)
            assert start is not None, "a prompt without its invocation is the base's"
            self.adapter_start = start
            self.first_own_block = self.adapter_start // block_size
        root_digest = self.adapter_digest if self.first_own_block is None else None
        self.root = root_hash(spec.digest, root_digest, request.cache_salt)
        self.block_hashes: list[bytes] = []

        own = spec.eos_token_ids if sampling.eos_token_ids is None else sampling.eos_token_ids
        self.stop_ids = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else own)
        self.end_ids = self.stop_ids | frozenset(own) | frozenset(spec.eos_token_ids)
        self.bias = _bias(dict(sampling.logit_bias)) if sampling.logit_bias else None
        self.stop_bias: Bias | None = None
        if sampling.min_tokens and self.stop_ids:
            self.stop_bias = _bias(dict(sampling.logit_bias) | dict.fromkeys(self.stop_ids, -math.inf))
        self.constraint: Constraint | None = None
        self.wants_logprobs = sampling.num_logprobs is not None
        # A resumed request has sent them with its first token.
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None and not request.resume_token_ids
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.wants_history = (
            sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
        )

    @property
    def num_output(self) -> int:
        """Generated tokens, resumed ones included."""
        return self.num_tokens - self.num_prompt

    @property
    def output_ids(self) -> NDArray[np.int32]:
        """Generated tokens [n], resumed ones included."""
        return self.token_ids[self.num_prompt : self.num_tokens]

    @property
    def draft_ids(self) -> NDArray[np.int32]:
        """This step's draft tokens [n], which follow the known tokens."""
        return self.token_ids[self.num_tokens : self.num_tokens + self.num_draft_tokens]

    def set_draft_tokens(self, draft_tokens: NDArray[np.int32]) -> None:
        """Set this step's draft tokens; the blocks for them must be held."""
        self.num_draft_tokens = len(draft_tokens)
        self.token_ids[self.num_tokens : self.num_tokens + len(draft_tokens)] = draft_tokens

    def bias_after(self, num_tokens: int) -> Bias | None:
        """The bias on the logits of the token after `num_tokens` tokens, prompt included."""
        is_early = num_tokens - self.num_prompt < self.request.sampling.min_tokens and self.stop_bias is not None
        return self.stop_bias if is_early else self.bias

    @property
    def may_skip_tokens(self) -> bool:
        """Whether it can start from cached K and V: mean pooling needs every token's own state."""
        return self.has_memory and (self.pooling is None or self.pooling.method == "last")

    def scored_tokens(self, start: int, end: int) -> range:
        """The tokens from `start` to `end` whose logits give a log-probability of the prompt that is still needed."""
        if not self.wants_prompt_logprobs:
            return range(0)
        return range(max(start, len(self.prompt_logprobs)), min(end, self.num_prompt - 1))

    @property
    def num_skippable(self) -> int:
        """Tokens from the first on whose logits are not needed: those that may be found in the cache."""
        needed = self.scored_tokens(0, self.num_prompt)
        return needed.start if needed else self.num_tokens - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks for so many tokens; 0 for an encoder, which computes all tokens in one step."""
        return -(-num_tokens // self.block_size) if self.has_memory else 0

    @property
    def num_pending(self) -> int:
        """Known tokens whose K and V are not in memory yet: 1 while decoding, more during prefill."""
        return self.num_tokens - self.num_computed

    def append(self, token_id: int) -> None:
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its last token, or None while it goes on."""
        if self.num_tokens == self.num_prompt:
            return None
        if self.matched_stop() is not None:
            return "stop"
        return "length" if self.num_output >= self.max_tokens else None

    def matched_stop(self) -> int | None:
        """The last generated token, if it ends the sequence."""
        if self.num_tokens == self.num_prompt:
            return None
        last = int(self.token_ids[self.num_tokens - 1])
        return last if last in self.stop_ids else None

    def usage(self) -> Usage:
        return Usage(self.num_prompt, self.num_cached or 0, self.num_output)

    def count_held(self, now_s: float) -> None:
        """Account for the blocks and rows held since the last call; call it before their number changes."""
        seconds = now_s - self.held_since_s
        self.block_seconds += self.num_blocks * seconds
        self.row_seconds += self.num_rank_rows * seconds
        self.held_since_s = now_s

    def count_load(self, size_bytes: int, took_s: float) -> None:
        """Account for a write of its adapter to the device that this sequence caused."""
        self.num_loads += 1
        self.load_bytes += size_bytes
        self.write_s += took_s

    def timing(self, now_s: float) -> RequestTiming:
        """Where its time went until `now_s`, which is the time of its first token if that was not noted."""
        started_s = self.started_s or now_s  # it may end before its first step
        self.first_s = first_s = self.first_s or now_s
        parts = (started_s - self.submitted_s, self.write_s, first_s - started_s - self.write_s, now_s - first_s)
        return RequestTiming(0, *(max(0, round(part * 1e6)) for part in parts))

    def request_usage(self) -> RequestUsage:
        """What it has used of this engine, and of engines before that have not reported their part."""
        charged = self.request.num_charged
        has_begun = self.num_cached is not None or self.num_given > self.num_prompt
        pays_prompt = charged is None and has_begun
        return RequestUsage(
            self.num_prompt if pays_prompt else 0,
            (self.num_cached or 0) if pays_prompt else 0,
            self.num_output - (charged or 0),
            self.num_loads,
            self.load_bytes,
            round(self.row_seconds * 1000),
            round(self.block_seconds * 1000),
        )

    def block_bytes(self, index: int) -> bytes:
        """The token ids of one full block as bytes: its hash covers them and a cache hit is compared with them."""
        start = index * self.block_size
        return self.token_ids[start : start + self.block_size].tobytes()

    def extend_hashes(self, num_blocks: int) -> list[bytes]:
        """Hash chain over at least the first `num_blocks` blocks, all of which must be full of known tokens."""
        hashes = self.block_hashes
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else self.root
            if len(hashes) == self.first_own_block and self.adapter_digest is not None:
                parent = activation_hash(parent, self.adapter_digest, self.adapter_start)
            hashes.append(block_hash(parent, self.block_bytes(len(hashes))))
        return hashes

    def held_blocks(self) -> list[int]:
        blocks: list[int] = self.block_table[: self.num_blocks].tolist()
        return blocks

    def add_blocks(self, blocks: list[int]) -> None:
        count = self.num_blocks
        self.block_table[count : count + len(blocks)] = blocks
        self.num_blocks = count + len(blocks)

    def forget_memory(self) -> None:
        """Reset after its blocks were released: every known token must be computed, or found in the cache, again."""
        self.block_table[: self.num_blocks] = 0
        self.num_blocks = 0
        self.num_computed = self.num_draft_tokens = 0
        self.adapter_slot = 0
        self.num_rank_rows = 0
        self.pooled_sums = np.zeros_like(self.pooled_sums)


class DraftLength:
    """Chooses the number of draft tokens of a sequence's next draft of one kind; 0 for none.

    Drafts grow while all their tokens are accepted and shrink to the accepted part. After a draft without an accepted
    token there is a pause, which doubles each time.
    """

    __slots__ = ("_length", "_num_rejections", "_pause")

    def __init__(self) -> None:
        self._length = FIRST_DRAFT_LENGTH
        self._num_rejections = self._pause = 0

    def length(self) -> int:
        """The length for the current step; to be called once per step."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Record how many tokens of a draft of at least one token were accepted."""
        if not num_accepted:
            self._num_rejections += 1
            self._pause = min(1 << self._num_rejections, MAX_PAUSE)
            self._length = 1
            return
        self._num_rejections = 0
        self._length = (
            min(2 * num_draft_tokens + 1, MAX_DRAFT_LENGTH) if num_accepted == num_draft_tokens else num_accepted + 1
        )


def _bias(amounts: dict[int, float]) -> Bias:
    return Bias(np.array(list(amounts), np.int64), np.array(list(amounts.values()), np.float32))
