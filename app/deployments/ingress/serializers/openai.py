"""OpenAI's chat completions and completions: response bodies and stream events, made from text deltas.

Completions can be returned as token ids, for trainers: `token_ids` then has every sampled token, including the one that
ended the answer, log-probabilities have an entry for each, and no id comes from tokenizing text again.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from pydantic_core import to_json

from app.deployments.ingress.dispatch.generation_task import GenerationTask, PredictionUsage, SequenceOutput
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, CompletionRequest
from app.deployments.ingress.serializers.detokenizer import TextDelta
from app.deployments.ingress.serializers.generate import usage_body
from app.deployments.ingress.serializers.tool_parser import (
    Piece,
    ToolCall,
    ToolCallReader,
    ToolCallStart,
    ToolConfig,
    ToolOutput,
)
from app.engine.request import TokenLogprobs, Usage

#: Tokens whose log-probabilities are written as JSON at once.
TOKENS_AT_ONCE = 256
#: Work on one log-probability besides its text, in characters.
_CHARS_PER_LOGPROB = 20

#: The rank of a prompt's first token, which has no log-probability.
_FIRST = -1

#: The text of a single token id; an incomplete character is U+FFFD.
TokenText = Callable[[int], str]
#: The bytes of a single token id, or those that it adds to an answer's text, which are none for a special token.
TokenBytes = Callable[[int], bytes]


class TokenOffsets:
    """Character offsets of one answer's tokens in its text, from the tokens' bytes.

    The emitted pieces of text cannot be used: a token may be part of a character, and text may be held back.
    """

    def __init__(self, text_bytes: TokenBytes) -> None:
        self._text_bytes = text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self.is_first = True  # no event of the answer has been sent
        self.is_at_start = True  # no log-probability of the answer has been written

    def push(self, token_id: int) -> int:
        """The offset of the next token; that of a token within a character is the character's."""
        offset = self._offset
        self._offset += len(self._decoder.decode(self._text_bytes(token_id)))
        return offset


@dataclass(frozen=True, slots=True)
class ChatSerializer:
    """Formats the answers of one request to /v1/chat/completions or /v1/completions."""

    is_chat: bool
    request_id: str
    created: int  # Unix time
    model: str
    token_text: TokenText
    token_bytes: TokenBytes
    text_bytes: TokenBytes
    want_logprobs: bool
    include_usage: bool = False  # a stream that ends with usage; null before
    has_continuous_usage: bool = False  # every event has its answer's usage so far
    tools: ToolConfig | None = None  # None: no tools
    routing: Mapping[str, Any] | None = None  # the semantic router's decision
    predictions: Mapping[int, PredictionUsage] | None = None  # filled when answers end
    ids: TokenIdOutput | None = None  # None: text only
    prompts: Sequence[Sequence[int]] = ()  # each answer's
    num_prompt_logprobs: int | None = None  # most likely tokens in `prompt_logprobs`; None: without that field
    num_echo_logprobs: int | None = None  # None: an answer's log-probabilities do not begin with the prompt's
    sequence_ids: Sequence[str] = ()  # each answer's; unique, which `request_id` is not if clients choose it

    @property
    def is_plain(self) -> bool:
        """Whether most events of a stream differ only in their text."""
        return not self.want_logprobs and self.ids is None and not self.has_continuous_usage

    async def content(self, answers: Sequence[SequenceOutput], num_per_prompt: int) -> bytes:
        """The JSON of the response to a request that does not stream; a long one is written in threads, choice by
        choice."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        usage = usage_body([answer.usage for answer in answers], num_per_prompt, self.predictions)
        length = sum(map(num_chars, answers))
        prompt = b""
        if self.is_chat:
            prompt = await in_worker_if_long(length, partial(self._prompt_logprobs, answers[0]))
        envelope = to_json(self._envelope(kind) | {"usage": usage} | self._routing())[:-1] + prompt
        choices = [
            await in_worker_if_long(length, partial(self._choice, index, answer))
            for index, answer in enumerate(answers)
        ]
        return await in_worker_if_long(
            sum(map(len, choices)), lambda: b'%b,"choices":[%b]}' % (envelope, b",".join(choices))
        )

    def role_event(self, index: int) -> dict[str, Any]:
        """A chat stream's first event for a choice."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event("chat.completion.chunk", choice) | self._routing()

    def event(self, index: int, delta: TextDelta, offsets: TokenOffsets) -> dict[str, Any]:
        """A stream event; `offsets` belongs to this choice and is passed to all of its events."""
        found: Sequence[TokenLogprobs] = delta.logprobs
        if self.num_echo_logprobs is not None and offsets.is_at_start:
            found, offsets.is_at_start = self._with_prompt(index, delta), False
        logprobs = self._logprobs(found, offsets)
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if self.is_chat:
            choice["delta"] = {"content": delta.text} if delta.text else {}
            return self._event("chat.completion.chunk", choice, delta)
        choice["text"] = delta.text
        if self.ids is not None:
            choice |= self.ids.choice(index, delta.token_ids, is_first=offsets.is_first)
            offsets.is_first = False
        return self._event("text_completion", choice, delta)

    def reader(self, index: int) -> ToolCallReader | None:
        """A parser for the tool calls of a choice, or None."""
        return None if self.tools is None else self.tools.reader(self.sequence_ids[index])

    def tool_events(
        self, index: int, delta: TextDelta, offsets: TokenOffsets, reader: ToolCallReader
    ) -> list[dict[str, Any]]:
        """The events of a delta whose text may contain calls: one per piece; the last one has everything but text."""
        pieces = reader.push(delta.text, is_last=delta.finish_reason is not None)
        deltas = [piece_delta(piece) for piece in pieces]
        last = self.event(index, delta._replace(text=""), offsets)
        choice = last["choices"][0]
        choice["finish_reason"] = reason_of(delta.finish_reason, reader.num_calls)
        if deltas:
            choice["delta"] = deltas.pop()
        elif delta.finish_reason is None and not choice["logprobs"]:
            return []
        plain = {"index": index, "logprobs": None, "finish_reason": None}
        return [self._event("chat.completion.chunk", plain | {"delta": each}) for each in deltas] + [last]

    def text_event(self, index: int) -> tuple[bytes, bytes]:
        """A server-sent event with only text, before and after the text's JSON."""
        event = b"data: %b\n\n" % to_json(self.event(index, TextDelta("\0"), TokenOffsets(self.text_bytes)))
        before, _, after = event.rpartition(to_json("\0"))
        return before, after

    def usage_event(self, usages: Sequence[Usage | None], num_per_prompt: int) -> dict[str, Any]:
        """The last event of a stream with usage: no choices."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._envelope(kind) | {"choices": [], "usage": usage_body(usages, num_per_prompt, self.predictions)}

    def _choice(self, index: int, answer: SequenceOutput) -> bytes:
        """The JSON of a complete answer. Log-probabilities are written some at a time, because writing JSON keeps other
        threads waiting."""
        fields = to_json(self._choice_fields(index, answer))[:-1]
        prompt = b"" if self.is_chat else self._prompt_logprobs(answer)
        return b'%b%b,"logprobs":%b}' % (fields, prompt, self._all_logprobs(self._with_prompt(index, answer)))

    def _with_prompt(self, index: int, answer: SequenceOutput | TextDelta) -> Sequence[TokenLogprobs]:
        """The log-probabilities of an answer's beginning; with `echo` the prompt's come first."""
        if self.num_echo_logprobs is None:
            return answer.logprobs
        prompt = [item._replace(top=item.top[: self.num_echo_logprobs]) for item in answer.prompt_logprobs]
        return [TokenLogprobs(self.prompts[index][0], 0.0, rank=_FIRST), *prompt, *answer.logprobs]

    def _prompt_logprobs(self, answer: SequenceOutput) -> bytes:
        """vLLM's field of this name after a comma: for each token of the prompt an object by token id, null for the
        first one. Nothing if it is not wanted."""
        if self.num_prompt_logprobs is None:
            return b""
        parts = [b"null"]
        for start in range(0, len(answer.prompt_logprobs), TOKENS_AT_ONCE):
            found: list[dict[int, Any]] = []
            for item in answer.prompt_logprobs[start : start + TOKENS_AT_ONCE]:
                top = [(*pair, rank) for rank, pair in enumerate(item.top[: self.num_prompt_logprobs], 1)]
                found.append({
                    token_id: {"logprob": finite(logprob), "rank": rank, "decoded_token": self.token_text(token_id)}
                    for token_id, logprob, rank in ((item.token_id, item.logprob, item.rank), *top)
                })  # fmt: skip
            parts.append(to_json(found)[1:-1])
        return b',"prompt_logprobs":[%b]' % b",".join(parts)

    def _all_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> bytes:
        offsets, lists, others = TokenOffsets(self.text_bytes), dict[str, list[bytes]](), dict[str, Any]()
        for start in range(0, max(len(logprobs), 1), TOKENS_AT_ONCE):
            part = self._logprobs(logprobs[start : start + TOKENS_AT_ONCE], offsets)
            if part is None:
                return b"null"
            for name, value in part.items():
                if isinstance(value, list):
                    lists.setdefault(name, []).extend([to_json(value)[1:-1]] if value else [])
                else:
                    others[name] = value
        fields = [b'"%b":[%b]' % (name.encode(), b",".join(items)) for name, items in lists.items()]
        return b"{%b}" % b",".join(fields + [b'"%b":%b' % (name.encode(), to_json(others[name])) for name in others])

    def _choice_fields(self, index: int, answer: SequenceOutput) -> dict[str, Any]:
        """A choice without its log-probabilities."""
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason}
        reader = self.reader(index)
        if reader is not None:
            output = ToolOutput()
            output.add(reader.push(answer.text, is_last=True))
            message: dict[str, Any] = {"role": "assistant", "content": output.text or None, "refusal": None}
            if output.calls:
                message["tool_calls"] = [call_body(call) for call in output.calls]
            return choice | {"message": message, "finish_reason": reason_of(answer.finish_reason, len(output.calls))}
        if self.is_chat:
            return choice | {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        ids = {} if self.ids is None else self.ids.choice(index, answer.token_ids, is_first=True)
        return choice | {"text": answer.text} | ids

    def _event(self, kind: str, choice: dict[str, Any], delta: TextDelta | None = None) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        if self.has_continuous_usage and delta is not None and delta.usage is not None:
            usage = {"usage": usage_body([delta.usage], 1)}
        return self._envelope(kind) | {"choices": [choice]} | usage

    def _routing(self) -> dict[str, Any]:
        return {} if self.routing is None else {"routing": self.routing}

    def _envelope(self, kind: str) -> dict[str, Any]:
        adapter = {} if self.ids is None else self.ids.adapter
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model, **adapter}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], offsets: TokenOffsets) -> dict[str, Any] | None:
        if not self.want_logprobs:
            return None
        if self.ids is not None and not self.ids.has_text:
            return lean_logprobs(logprobs)
        return self._chat_logprobs(logprobs) if self.is_chat else self._legacy_logprobs(logprobs, offsets)

    def _chat_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            return {
                "token": self.token_text(token_id),
                "logprob": finite(logprob),
                "bytes": list(self.token_bytes(token_id)),
            }

        content = [
            entry(item.token_id, item.logprob) | {"top_logprobs": [entry(*top) for top in item.top]}
            for item in logprobs
        ]
        return {"content": content, "refusal": None}

    def _legacy_logprobs(self, logprobs: Sequence[TokenLogprobs], offsets: TokenOffsets) -> dict[str, Any]:
        tops: list[dict[str, float] | None] = []
        for item in logprobs:
            if item.rank == _FIRST:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for token_id, logprob in item.top:
                top.setdefault(self._legacy_token(token_id), finite(logprob))
            top[self._legacy_token(item.token_id)] = finite(item.logprob)
            tops.append(top)
        return {
            "tokens": [self._legacy_token(item.token_id) for item in logprobs],
            "token_logprobs": [None if item.rank == _FIRST else finite(item.logprob) for item in logprobs],
            "top_logprobs": tops,
            "text_offset": [offsets.push(item.token_id) for item in logprobs],
        }

    def _legacy_token(self, token_id: int) -> str:
        """A token's text; parts of characters are written as bytes like OpenAI does, so that they stay distinct."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return text
        raw = self.token_bytes(token_id)
        return text if raw == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_serializer(body: ChatCompletionRequest | CompletionRequest, task: GenerationTask) -> ChatSerializer:
    """The serializer of one request's answers, which all have one adapter."""
    tokenizer = task.decoders[0].tokenizer
    is_chat = isinstance(body, ChatCompletionRequest)
    return ChatSerializer(
        is_chat=is_chat,
        request_id=task.request_id,
        created=int(task.requests[0].arrival_s),
        model=body.model,
        token_text=tokenizer.token_text,
        token_bytes=tokenizer.token_bytes,
        text_bytes=tokenizer.text_bytes,
        want_logprobs=body.logprobs if isinstance(body, ChatCompletionRequest) else body.logprobs is not None,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        has_continuous_usage=body.stream_options is not None and body.stream_options.continuous_usage_stats,
        tools=task.tools,
        predictions=task.progress.predictions,
        routing=None if task.decision is None else task.decision.body(),
        prompts=[request.token_ids for request in task.requests],
        num_prompt_logprobs=body.prompt_logprobs,
        num_echo_logprobs=body.logprobs if isinstance(body, CompletionRequest) and body.echo else None,
        sequence_ids=[request.request_id for request in task.requests],
        ids=TokenIdOutput(task, not isinstance(body, CompletionRequest) or body.detokenize) if task.keeps_end else None,
    )


def num_chars(answer: SequenceOutput | TextDelta) -> int:
    """Characters of an answer or a part of it, as a measure of the work on it."""
    num_logprobs = sum(
        len(items) * (1 + len(items[0].top)) for items in (answer.logprobs, answer.prompt_logprobs) if items
    )
    return len(answer.text) + len(answer.token_ids) + num_logprobs * _CHARS_PER_LOGPROB


def reason_of(finish_reason: str | None, num_calls: int) -> str | None:
    """OpenAI's finish reason: "tool_calls" for an answer that ended with calls."""
    return "tool_calls" if num_calls and finish_reason == "stop" else finish_reason


def call_body(call: ToolCall) -> dict[str, Any]:
    """A complete tool call."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def piece_delta(piece: Piece) -> dict[str, Any]:
    """The `delta` of a stream event for a piece of an answer with tools."""
    if isinstance(piece, str):
        return {"content": piece}
    if isinstance(piece, ToolCallStart):
        call = {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
        return {"tool_calls": [{"index": piece.index} | call]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.piece}}]}


class NoText:
    """`Decoder` of an answer without text."""

    def push(self, token_ids: Sequence[int]) -> str:  # noqa: ARG002
        return ""

    def flush(self) -> str:
        return ""


class TokenIdOutput(NamedTuple):
    """Additional fields of one task's answers in token ids. `has_text`: the answers have text, too."""

    task: GenerationTask
    has_text: bool

    @property
    def adapter(self) -> dict[str, Any]:
        """The adapter, fixed for the whole answer when the request arrived; null is the base model."""
        ref = self.task.requests[0].requested_adapter
        adapter = None if ref is None else {"name": ref.name, "generation": ref.generation, "digest": ref.digest}
        return {"adapter": adapter}

    def choice(self, index: int, token_ids: Sequence[int], *, is_first: bool) -> dict[str, Any]:
        """Fields of a choice or a piece of one; the first piece includes the prompt."""
        prompt = {"prompt_token_ids": self.task.requests[index].token_ids} if is_first else {}
        return {**prompt, "token_ids": token_ids}


def in_token_ids(task: GenerationTask, body: CompletionRequest) -> GenerationTask:
    """The task with the client's choice of output: token ids, with text or without, or only text."""
    if not body.wants_token_ids:
        return task
    decoders = task.decoders if body.detokenize else tuple(each._replace(new=NoText) for each in task.decoders)
    return replace(task, keeps_end=True, decoders=decoders)


def lean_logprobs(logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Log-probabilities without text; top tokens are named `token_id:…` as in vLLM."""
    body: dict[str, Any] = {"token_logprobs": [finite(item.logprob) for item in logprobs]}
    if any(item.top for item in logprobs):
        body["top_logprobs"] = [
            {f"token_id:{token_id}": finite(logprob) for token_id, logprob in item.top} for item in logprobs
        ]
    return body


def finite(logprob: float) -> float:
    """JSON has no infinity and no NaN; OpenAI writes -9999 for a token of probability 0."""
    return max(-9999.0, logprob)  # in this order: max() returns its first argument for a NaN
