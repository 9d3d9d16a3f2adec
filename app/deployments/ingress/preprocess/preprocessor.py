"""Preprocessor: everything between a parsed body and the dispatcher.

Names become adapter references and text becomes token ids here; nothing behind this module sees either. The result is a
`GenerationTask`, ready to run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from app.config import LimitsConfig
from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.dispatch.dispatcher import Dispatcher
from app.deployments.ingress.dispatch.generation_task import GenerationTask, PromptDecoder
from app.deployments.ingress.preprocess.adapter_directory import AdapterDirectory
from app.deployments.ingress.preprocess.adapter_resolution import AdapterResolver
from app.deployments.ingress.preprocess.sequence_builder import (
    FieldNames,
    RequestIds,
    SequenceBuilder,
    TokenLimit,
    request_ids,
)
from app.deployments.ingress.preprocess.structured_output import RequestedGrammar, requested_grammar
from app.deployments.ingress.preprocess.tokenizer_service import (
    MAX_INLINE_CHARS,
    TokenizerService,
    in_worker_if_long,
)
from app.deployments.ingress.preprocess.tools import (
    ChatFields,
    chat_grammar,
    num_chars_until,
    template_messages,
    template_tools,
)
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import (
    DEFAULT_COMPLETION_TOKENS,
    DEFAULT_GENERATE_TOKENS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerateBody,
    SamplingFields,
)
from app.deployments.ingress.semantic_router.decision import Decision
from app.deployments.ingress.semantic_router.router import SemanticRouter
from app.deployments.ingress.serializers.openai import in_token_ids
from app.deployments.ingress.serializers.tool_parser import ToolConfig
from app.deployments.registry.models import AUTO
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.adapters.adapter_tokenizer import cached_adapter_tokenizer
from app.engine.adapters.card import AdapterRef
from app.engine.errors import ContextOverflow, InvalidRequest
from app.engine.scheduling.fair_limiter import FairSemaphore

T = TypeVar("T")

#: Adapters' chat templates that one ingress renders at a time, each in a process and with a thread that waits for it.
MAX_RENDERS = 4


class _ResolvedModel(NamedTuple):
    """A body's adapter. For `model: "auto"` also the decision and the reservation made for it."""

    ref: AdapterRef | None
    decision: Decision | None = None
    reservation: Reservation | None = None


class RequestPreprocessor:
    """One per ingress process. `clock` gives Unix time; `num_kv_tokens` is the KV capacity of every engine (0:
    unknown)."""

    def __init__(
        self,
        tokenizer: TokenizerService,
        base_name: str,
        directory: AdapterDirectory,
        resolver: AdapterResolver,
        dispatcher: Dispatcher,
        limits: LimitsConfig,
        accounting: RequestAccounting,
        clock: Callable[[], float],
        semantic_router: SemanticRouter,
        num_kv_tokens: Callable[[], int],
    ) -> None:
        self.tokenizer = tokenizer
        self._base_name = base_name
        self.directory = directory
        self.resolver = resolver
        self._dispatcher = dispatcher
        self.limits = limits
        self._sequence_builder = SequenceBuilder(
            self.tokenizer_of, lambda: self.limits, lambda: self.max_model_len, directory.needs_adapter,
            directory.defaults,
        )  # fmt: skip
        self._accounting = accounting
        self._clock = clock
        self.semantic_router = semantic_router
        self._num_kv_tokens = num_kv_tokens
        self._rendering = FairSemaphore("adapters' chat templates", MAX_RENDERS, max_per_tenant=1)
        self._render_threads = ThreadPoolExecutor(MAX_RENDERS, "chat-template")

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer that every engine accepts, as far as engines have reported their capacity."""
        return min(self.tokenizer.max_model_len, self._num_kv_tokens() or self.tokenizer.max_model_len)

    def tokenizer_of(self, ref: AdapterRef | None) -> TokenizerService:
        """The tokenizer with the tokens that the adapter adds. Raises CombinationError as `AdapterDirectory.text`."""
        return self.tokenizer.of_adapter(self.directory.text(ref))

    @asynccontextmanager
    async def _resolve_model(
        self, body: ChatCompletionRequest | CompletionRequest, caller: Principal, question: str
    ) -> AsyncIterator[_ResolvedModel]:
        """The adapter of a body, chosen by the semantic router for `model: "auto"`. Raises the errors of both."""
        if body.model != AUTO:
            if body.routing is not None:
                raise InvalidRequest(f"routing is only for model {AUTO!r}; remove it", param="routing")
            yield _ResolvedModel(
                await self.resolver.resolve(body.model, caller, body.lora_path, body.user, body.adapters)
            )
            return
        if body.lora_path is not None or body.adapters is not None:
            raise InvalidRequest(f"model {AUTO!r} chooses the adapter; remove lora_path and adapters", param="model")
        while True:
            async with self.semantic_router.selection(question, caller, body.routing) as (decision, reservation):
                if not decision.chosen:
                    ref = await self.resolver.resolve(None, caller)
                elif len(decision.chosen) == 1:
                    ref = await self.resolver.resolve(decision.chosen[0].name, caller, user=body.user)
                else:
                    ref = await self.resolver.resolve(None, caller, user=body.user, adapters=decision.adapters)
                if self.semantic_router.has_score_head(decision):  # it was read only now, and is no candidate any more
                    self._accounting.give_back(reservation)
                    continue
                yield _ResolvedModel(ref, decision, reservation)
                return

    async def chat(
        self, body: ChatCompletionRequest, caller: Principal, request_id: str | None = None
    ) -> GenerationTask:
        """`request_id` is the client's own. Raises NotFound, InvalidRequest, ContextOverflow, LimitError."""
        self._check_generates()
        arrival_s = self._clock()
        question = "" if body.model != AUTO else last_user_text(body.messages)
        async with self._resolve_model(body, caller, question) as resolved:
            token_ids = await self.chat_ids(body, resolved.ref, caller)
            text, tokenizer = self.directory.text(resolved.ref), self.tokenizer_of(resolved.ref)
            make = partial(chat_grammar, body, tokenizer, text)
            takes_long = body.tools or body.has_grammar
            requested, tools = await asyncio.to_thread(make) if takes_long else make()
            if requested is not None and body.continue_final_message:
                requested = await asyncio.to_thread(tokenizer.continuation, requested, body.messages[-1].text)
            num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
            names = FieldNames("messages", body.limit_field, "top_logprobs")
            return await self._task(
                request_ids("chatcmpl", request_id),
                caller,
                arrival_s,
                body,
                [token_ids],
                [resolved.ref],
                TokenLimit(body.token_limit),
                num_logprobs,
                names,
                requested=requested,
                tools=tools,
                resolved=resolved,
                prediction=await self._prediction_ids(body, tokenizer),
                is_stream=body.stream,
                continues=body.continue_final_message,
                prompt_logprobs=body.prompt_logprobs,
            )

    async def _prediction_ids(self, body: ChatCompletionRequest, tokenizer: TokenizerService) -> tuple[int, ...]:
        if body.prediction is None:
            return ()
        text, max_model_len = body.prediction.text, tokenizer.max_model_len
        token_ids = await in_worker_if_long(len(text), lambda: tokenizer.encode_answer(text))
        if len(token_ids) > max_model_len:
            raise InvalidRequest(
                f"the prediction has {len(token_ids)} tokens but the context holds {max_model_len}; shorten it",
                param="prediction",
            )
        return tuple(token_ids)

    async def chat_ids(self, body: ChatFields, ref: AdapterRef | None, caller: Principal) -> Sequence[int]:
        """Token ids of a conversation with this adapter, up to the assistant's turn.

        The adapter's default system prompt is for conversations without a system message.

        An adapter's own template may be slow: a tenant renders one at a time, and those that wait are served in turn
        between tenants. Raises InvalidRequest, QueueFull, NotReady.
        """
        text, system_prompt = self.directory.text(ref), self.directory.defaults(ref).system_prompt
        tokenizer = self.tokenizer.of_adapter(text)

        def encode() -> Sequence[int]:
            messages, tools = template_messages(body.messages), template_tools(body)
            if system_prompt is not None and all(message["role"] != "system" for message in messages):
                messages = [{"role": "system", "content": system_prompt}, *messages]
            return tokenizer.encode_chat(
                messages,
                text,
                tools,
                body.chat_template_kwargs,
                body.add_generation_prompt,
                body.continue_final_message,
                caller.tenant_id,
            )

        if cached_adapter_tokenizer(text).changes_prompts:
            async with self._rendering.hold(caller.tenant_id):
                return await _run_to_end(asyncio.get_running_loop().run_in_executor(self._render_threads, encode))
        return await in_worker_if_long(num_chars_until(body, MAX_INLINE_CHARS + 1), encode)

    async def completion(
        self, body: CompletionRequest, caller: Principal, request_id: str | None = None
    ) -> GenerationTask:
        """Like `chat`."""
        self._check_generates()
        arrival_s = self._clock()
        prompts = body.prompts
        if body.model == AUTO and (len(prompts) != 1 or not isinstance(prompts[0], str)):
            raise InvalidRequest(f"model {AUTO!r} needs exactly one prompt, as text", param="prompt")
        async with self._resolve_model(body, caller, str(prompts[0]) if prompts else "") as resolved:
            names = FieldNames("prompt", "max_tokens", "logprobs")
            self._sequence_builder.check_sequences(len(prompts), body.n, names)
            token_ids = await self.prompt_ids(prompts, [resolved.ref] * len(prompts), "prompt")
            wanted = (body.prompt_logprobs, body.logprobs if body.echo else None)
            task = await self._task(
                request_ids("cmpl", request_id),
                caller,
                arrival_s,
                body,
                token_ids,
                [resolved.ref] * len(prompts),
                TokenLimit(body.token_limit, DEFAULT_COMPLETION_TOKENS),
                body.logprobs,
                names,
                echoes=await self._echoes(prompts, resolved.ref) if body.echo else (),
                resolved=resolved,
                is_stream=body.stream,
                prompt_logprobs=max((n for n in wanted if n is not None), default=None),
            )
        return in_token_ids(task, body)

    async def _echoes(self, prompts: Sequence[str | list[int]], ref: AdapterRef | None) -> list[str]:
        length = sum(map(len, prompts))
        return await in_worker_if_long(
            length, lambda: [p if isinstance(p, str) else self.text_of(p, ref) for p in prompts]
        )

    def text_of(self, token_ids: Sequence[int], ref: AdapterRef | None) -> str:
        """Text of an adapter's tokens, without special ones."""
        decoder = self.tokenizer_of(ref).decoder()
        return decoder.push(token_ids) + decoder.flush()

    async def generate(self, body: GenerateBody, caller: Principal, request_id: str | None = None) -> GenerationTask:
        """Like `chat`."""
        self._check_generates()
        arrival_s = self._clock()
        if body.adapters is not None and body.lora_path is not None:
            raise InvalidRequest("a request has either adapters or lora_path; remove one", param="adapters")
        params = body.sampling_params
        names = FieldNames("text", params.limit_field, "logprobs", "sampling_params.n")
        self._sequence_builder.check_sequences(len(body.names), params.n, names)
        refs = [await self.resolver.resolve(None, caller, name, adapters=body.adapters) for name in body.names]
        token_ids = await self.prompt_ids(body.texts, refs, "text")
        limit = TokenLimit(params.token_limit, DEFAULT_GENERATE_TOKENS)
        return await self._task(
            request_ids("gen", request_id), caller, arrival_s, params, token_ids, refs, limit, None, names
        )

    def _check_generates(self) -> None:
        if self.tokenizer.spec.encoder is not None:
            raise InvalidRequest(
                f"{self._base_name!r} is an encoder and generates no text; use POST /v1/embeddings",
                param="model",
            )

    async def prompt_ids(
        self, prompts: Sequence[str | list[int]], refs: Sequence[AdapterRef | None], param: str
    ) -> list[Sequence[int]]:
        """Token ids of prompts, each for its adapter; ids stay as they are. `param` is the body's field. Raises
        InvalidRequest."""
        length = sum(map(len, prompts))  # ids are checked one by one
        pairs = list(zip(prompts, map(self.tokenizer_of, refs), strict=True))
        return await in_worker_if_long(length, lambda: [self._ids_of(*pair, param) for pair in pairs])

    def _ids_of(self, prompt: str | list[int], tokenizer: TokenizerService, param: str) -> Sequence[int]:
        if isinstance(prompt, str):
            try:
                return tokenizer.encode(prompt)
            except ContextOverflow as error:
                error.param = param
                raise
        for token_id in prompt:
            if token_id >= tokenizer.vocab_size:
                raise InvalidRequest(
                    f"{param} has token id {token_id} but the vocabulary ends at {tokenizer.vocab_size - 1}",
                    param=param,
                )
        return prompt

    async def _task(
        self,
        ids: RequestIds,
        caller: Principal,
        arrival_s: float,
        fields: SamplingFields,
        prompts: Sequence[Sequence[int]],
        refs: Sequence[AdapterRef | None],
        limit: TokenLimit,
        num_logprobs: int | None,
        names: FieldNames,
        *,
        requested: RequestedGrammar | None = None,
        tools: ToolConfig | None = None,
        echoes: Sequence[str] = (),
        resolved: _ResolvedModel | None = None,
        prediction: tuple[int, ...] = (),
        is_stream: bool = False,
        continues: bool = False,
        prompt_logprobs: int | None = None,
    ) -> GenerationTask:
        if requested is None and fields.has_grammar:
            requested = await asyncio.to_thread(requested_grammar, fields, self.tokenizer.enforceable)
        tokenizers = [self.tokenizer_of(ref) for ref in refs]
        shown = frozenset[int]() if tools is None else tools.shown_ids
        decoders = {}
        for tokenizer in dict.fromkeys(tokenizers):
            if requested is not None:
                await asyncio.to_thread(tokenizer.check_grammar, requested)
            new = partial(tokenizer.decoder, shown, continues=continues)
            decoders[tokenizer] = PromptDecoder(tokenizer, new, tokenizer.specials_in(fields.stop_strings))
        requests = self._sequence_builder.build(
            ids, caller, arrival_s, fields, prompts, refs, limit, num_logprobs, prompt_logprobs, names,
            requested, prediction, is_stream=is_stream,
        )  # fmt: skip
        await self._dispatcher.refusals.check(requests)
        deadline_s = asyncio.get_running_loop().time() + self.limits.request_timeout_s
        reservation = await self._accounting.admit(caller, requests, None if resolved is None else resolved.reservation)
        return GenerationTask(
            ids.public,
            requests,
            caller,
            reservation,
            fields.stop_strings,
            fields.n,
            deadline_s,
            self._dispatcher,
            tuple(decoders[tokenizer] for tokenizer in tokenizers),
            self._clock,
            tools=tools,
            echoes=tuple(echo for echo in echoes for _ in range(fields.n)),
            decision=None if resolved is None else resolved.decision,
            unenforced=() if requested is None else requested.unenforced,
        )


def last_user_text(messages: Sequence[ChatMessage]) -> str:
    """The last user message of a conversation, which the semantic router embeds."""
    return next((message.text for message in reversed(messages) if message.role == "user"), messages[-1].text)


async def _run_to_end(work: asyncio.Future[T]) -> T:
    """The result of work in a thread. When cancelled, wait for its end first, so that its place is not free before."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
