"""Requests in words become requests in token ids: everything between a parsed body and the dispatcher.

In: parsed bodies, and who sent them. Out: `Job`s: the sequences of one request, ready to run. Names become adapter
references here and text becomes token ids; behind this module there are neither.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from app.config import LimitsConfig
from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.dispatch.dispatcher import Dispatcher
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.preprocess.adapter_directory import AdapterDirectory
from app.deployments.ingress.preprocess.adapter_resolution import AdapterResolver
from app.deployments.ingress.preprocess.sequence_builder import FieldNames, RequestIds, SequenceBuilder, request_ids
from app.deployments.ingress.preprocess.structured_output import RequestedGrammar, requested_grammar
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService, in_worker_if_long
from app.deployments.ingress.preprocess.tools import ChatFields, chat_grammar, template_messages, template_tools
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerateBody,
    SamplingFields,
)
from app.deployments.ingress.semantic_router.decision import Decision
from app.deployments.ingress.semantic_router.selection import AdapterSelector
from app.deployments.ingress.serializers.token_id_output import in_token_ids
from app.deployments.ingress.serializers.tool_parser import ToolConfig
from app.deployments.registry.models import AUTO
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.adapters.card import AdapterRef
from app.engine.errors import InvalidRequest

#: A message without text takes as long as so many characters: its role is written by the template and tokenized too.
CHARS_PER_MESSAGE = 32


class _Found(NamedTuple):
    """What a body's names mean. What was chosen has a decision, and `get_object` of the caller's limits."""

    ref: AdapterRef | None
    decision: Decision | None = None
    held: Reservation | None = None


class RequestPreprocessor:
    """One per ingress process. `clock` gives Unix time; `num_kv_tokens` is what every engine holds (0: not known)."""

    def __init__(
        self,
        model: TokenizerService,
        base_name: str,
        names: AdapterDirectory,
        finder: AdapterResolver,
        source: Dispatcher,
        limits: LimitsConfig,
        tenancy: RequestAccounting,
        clock: Callable[[], float],
        chooser: AdapterSelector,
        num_kv_tokens: Callable[[], int],
    ) -> None:
        self.text_model = model
        self._base_name = base_name
        self.names = names
        self.finder = finder
        self._source = source
        self.limits = limits
        self._requests = SequenceBuilder(model, lambda: self.limits, lambda: self.max_model_len, names.needed)
        self._tenancy = tenancy
        self._clock = clock
        self.chooser = chooser
        self._num_kv_tokens = num_kv_tokens

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer that every engine takes, as far as engines have said what they hold."""
        return min(self.text_model.max_model_len, self._num_kv_tokens() or self.text_model.max_model_len)

    @asynccontextmanager
    async def _found(
        self, body: ChatCompletionRequest | CompletionRequest, caller: Principal, question: str
    ) -> AsyncIterator[_Found]:
        """What a body's names mean, or what is chosen for what it asks. Raises what finding and choosing raise."""
        if body.model != AUTO:
            if body.routing is not None:
                raise InvalidRequest(f"routing says how to choose, which only model {AUTO!r} does", param="routing")
            yield _Found(await self.finder.find(body.model, caller, body.lora_path, body.user, body.adapters))
            return
        if body.lora_path is not None or body.adapters is not None:
            raise InvalidRequest(f"model {AUTO!r} chooses the adapter; name none", param="model")
        async with self.chooser.choosing(question, caller, body.routing) as (decision, held):
            if not decision.chosen:
                ref = await self.finder.find(self._base_name, caller)
            elif len(decision.chosen) == 1:
                ref = await self.finder.find(decision.chosen[0].name, caller, user=body.user)
            else:
                ref = await self.finder.find(self._base_name, caller, user=body.user, adapters=decision.adapters)
            yield _Found(ref, decision, held)

    async def chat(
        self, body: ChatCompletionRequest, caller: Principal, request_id: str | None = None
    ) -> GenerationTask:
        """request_id: as its sender calls it. Raises NotFound, InvalidRequest, ContextOverflow, LimitError."""
        self._check_generates()
        arrival_s = self._clock()
        question = "" if body.model != AUTO else last_user_text(body.messages)
        async with self._found(body, caller, question) as found:
            token_ids = await self.chat_ids(body, found.ref)
            wanted, tools = chat_grammar(body, self.text_model, self.names.text(found.ref))
            num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
            names = FieldNames("messages", body.limit_field, "top_logprobs")
            return await self._job(
                request_ids("chatcmpl", request_id),
                caller,
                arrival_s,
                body,
                [token_ids],
                [found.ref],
                body.token_limit,
                num_logprobs,
                names,
                wanted=wanted,
                tools=tools,
                found=found,
                prediction=await self._predicted(body),
            )

    async def _predicted(self, body: ChatCompletionRequest) -> tuple[int, ...]:
        if body.prediction is None:
            return ()
        text, max_model_len = body.prediction.text, self.text_model.max_model_len
        token_ids = await in_worker_if_long(len(text), lambda: self.text_model.encode_answer(text))
        if len(token_ids) > max_model_len:
            raise InvalidRequest(
                f"the prediction has {len(token_ids)} tokens but the context holds {max_model_len}; shorten it",
                param="prediction",
            )
        return tuple(token_ids)

    async def chat_ids(self, body: ChatFields, ref: AdapterRef | None) -> Sequence[int]:
        """Token ids of a conversation with this adapter, up to where the assistant answers. Raises InvalidRequest."""
        text = self.names.text(ref)
        messages, tools = template_messages(body.messages), template_tools(body)
        num_chars = sum(len(message["content"]) + CHARS_PER_MESSAGE for message in messages)
        num_chars += len(json.dumps(tools)) if tools else 0
        encode = partial(self.text_model.encode_chat, messages, text, tools, body.chat_template_kwargs)
        if text:  # an adapter's own template may take its time
            return await asyncio.to_thread(encode)
        return await in_worker_if_long(num_chars, encode)

    async def completion(
        self, body: CompletionRequest, caller: Principal, request_id: str | None = None
    ) -> GenerationTask:
        """As `chat`."""
        self._check_generates()
        arrival_s = self._clock()
        prompts = body.prompts
        if body.model == AUTO and (len(prompts) != 1 or not isinstance(prompts[0], str)):
            raise InvalidRequest(f"model {AUTO!r} chooses for one prompt of characters", param="prompt")
        async with self._found(body, caller, str(prompts[0]) if prompts else "") as found:
            names = FieldNames("prompt", "max_tokens", "logprobs")
            self._requests.check_sequences(len(prompts), body.n, names)
            token_ids = await self.prompt_ids(prompts, "prompt")
            job = await self._job(
                request_ids("cmpl", request_id),
                caller,
                arrival_s,
                body,
                token_ids,
                [found.ref] * len(prompts),
                body.max_tokens,
                body.logprobs,
                names,
                echoes=await self._echoes(prompts) if body.echo else (),
                found=found,
            )
        return in_token_ids(job, body)

    async def _echoes(self, prompts: Sequence[str | list[int]]) -> list[str]:
        length = sum(map(len, prompts))
        return await in_worker_if_long(length, lambda: [p if isinstance(p, str) else self.text_of(p) for p in prompts])

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        decoder = self.text_model.decoder()
        return decoder.push(token_ids) + decoder.flush()

    async def generate(self, body: GenerateBody, caller: Principal, request_id: str | None = None) -> GenerationTask:
        """As `chat`."""
        self._check_generates()
        arrival_s = self._clock()
        if body.adapters is not None and body.lora_path is not None:
            raise InvalidRequest("adapters lists all adapters of a request; leave lora_path out", param="adapters")
        params = body.sampling_params
        names = FieldNames("text", params.limit_field, "logprobs", "sampling_params.n")
        self._requests.check_sequences(len(body.names), params.n, names)
        refs = [await self.finder.find(self._base_name, caller, name, adapters=body.adapters) for name in body.names]
        token_ids = await self.prompt_ids(body.texts, "text")
        return await self._job(
            request_ids("gen", request_id), caller, arrival_s, params, token_ids, refs, params.token_limit, None, names
        )

    def _check_generates(self) -> None:
        if self.text_model.spec.encoder is not None:
            raise InvalidRequest(
                f"{self._base_name!r} is an encoder: it writes no text; POST /v1/embeddings has its vectors",
                param="model",
            )

    async def prompt_ids(self, prompts: Sequence[str | list[int]], param: str) -> list[Sequence[int]]:
        """Token ids of texts; ids stay as they are. `param` is what the client calls them. Raises InvalidRequest."""
        length = sum(map(len, prompts))  # ids are looked at one by one, as characters are
        return await in_worker_if_long(length, lambda: [self._ids_of(prompt, param) for prompt in prompts])

    def _ids_of(self, prompt: str | list[int], param: str) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.text_model.encode(prompt)
        for token_id in prompt:
            if token_id >= self.text_model.vocab_size:
                raise InvalidRequest(
                    f"{param} has token id {token_id} but the vocabulary ends at {self.text_model.vocab_size - 1}",
                    param=param,
                )
        return prompt

    async def _job(
        self,
        ids: RequestIds,
        caller: Principal,
        arrival_s: float,
        fields: SamplingFields,
        prompts: Sequence[Sequence[int]],
        refs: Sequence[AdapterRef | None],
        max_tokens: int | None,
        num_logprobs: int | None,
        names: FieldNames,
        *,
        wanted: RequestedGrammar | None = None,
        tools: ToolConfig | None = None,
        echoes: Sequence[str] = (),
        found: _Found | None = None,
        prediction: tuple[int, ...] = (),
    ) -> GenerationTask:
        wanted = wanted or requested_grammar(fields)
        if wanted is not None:
            await asyncio.to_thread(self.text_model.check_grammar, wanted)
        requests = self._requests.build(
            ids, caller, arrival_s, fields, prompts, refs, max_tokens, num_logprobs, names,
            "" if wanted is None else wanted.grammar, prediction,
        )  # fmt: skip
        deadline_s = asyncio.get_running_loop().time() + self.limits.request_timeout_s
        reservation = await self._tenancy.admit(caller, requests, None if found is None else found.held)
        return GenerationTask(
            ids.shown,
            requests,
            caller,
            reservation,
            fields.stop_strings,
            fields.n,
            deadline_s,
            self._source,
            self.text_model.decoder if tools is None else partial(self.text_model.decoder, tools.shown_ids),
            self._clock,
            tools=tools,
            echoes=tuple(echo for echo in echoes for _ in range(fields.n)),
            decision=None if found is None else found.decision,
        )


def last_user_text(messages: Sequence[ChatMessage]) -> str:
    """What a conversation asks now: its last message of a user."""
    return next((message.text for message in reversed(messages) if message.role == "user"), messages[-1].text)
