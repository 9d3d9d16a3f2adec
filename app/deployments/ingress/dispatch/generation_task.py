"""One client request in progress: its sequences, and their answers, complete or as a merged stream.

When the reader leaves or one sequence fails, all sequences of the task end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from app.deployments.ingress.dispatch.dispatcher import Dispatcher
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.semantic_router.decision import Decision
from app.deployments.ingress.serializers.detokenizer import Decoder, TextDelta, text_deltas
from app.deployments.ingress.serializers.tool_parser import ToolConfig
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.request import GenerateRequest, RequestTiming, TokenChunk, TokenLogprobs, Usage
from app.engine.spec_decode.ngram_proposer import num_predicted_tokens


@dataclass(slots=True)
class SequenceOutput:
    """One sequence's complete answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage


class PromptDecoder(NamedTuple):
    """Text of the answers to one prompt. `tokenizer`: with its adapter's added tokens. `special_stops`: the special
    tokens in stop strings, id → text."""

    tokenizer: TokenizerService
    new: Callable[[], Decoder]
    special_stops: Mapping[int, str] = {}


class PredictionUsage(NamedTuple):
    """Predicted tokens that occur in the answer at their place, and the others."""

    num_accepted: int
    num_rejected: int


@dataclass(slots=True)
class Progress:
    """Unix time of the task's first text, and each sequence's usage so far, and its timing with the Unix time at which
    that arrived.

    `predictions`: by sequence, once a predicted answer has ended. `assigned` is set when each of the `num_assigned`
    sequences has been sent to a replica.
    """

    first_s: float | None = None
    usages: dict[int, Usage] = field(default_factory=dict)
    timings: dict[int, tuple[float, RequestTiming]] = field(default_factory=dict)
    predictions: dict[int, PredictionUsage] = field(default_factory=dict)
    assigned: asyncio.Event = field(default_factory=asyncio.Event)
    num_assigned: int = 0


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """The sequences of one client request: `num_per_prompt` (n) for each prompt, in order.

    `deadline_s` is on the event loop's clock; `clock` gives Unix time. `reservation` holds quota of the caller.
    `tools`: how answers call tools, if they may. `echoes`: the text that each answer repeats first, or (). `decision`:
    the routing decision of `model: "auto"`. `keeps_end`: answers keep their stop token. `unenforced`: parts of
    schemas that answers need not follow. `decoders`: of each prompt, whose adapters may have tokens of their own.
    """

    request_id: str
    requests: tuple[GenerateRequest, ...]
    caller: Principal
    reservation: Reservation
    stops: tuple[str, ...]
    num_per_prompt: int
    deadline_s: float
    dispatcher: Dispatcher
    decoders: tuple[PromptDecoder, ...]
    clock: Callable[[], float]
    progress: Progress = field(default_factory=Progress)
    tools: ToolConfig | None = None
    echoes: tuple[str, ...] = ()
    decision: Decision | None = None
    keeps_end: bool = False
    unenforced: tuple[str, ...] = ()

    @property
    def usages(self) -> list[Usage | None]:
        """Each sequence's usage so far; None before its first token."""
        return [self.progress.usages.get(index) for index in range(len(self.requests))]

    async def answers(self) -> list[SequenceOutput]:
        """All answers, complete. One failure ends all sequences."""
        answers = [SequenceOutput() for _ in self.requests]
        async for index, delta in self.deltas():
            answers[index].add(delta)
        return answers

    def deltas(self) -> AsyncGenerator[tuple[int, TextDelta]]:
        """(sequence index, delta) as they arrive. Closing the generator aborts what still runs.

        Raises any sequence's error, including DeadlineExceeded.
        """
        return self._sequence_deltas(0) if len(self.requests) == 1 else self._merge()

    async def _sequence_deltas(self, index: int) -> AsyncGenerator[tuple[int, TextDelta]]:
        request = self.requests[index]
        chunks = self.dispatcher.stream(request, self.deadline_s, self._note_assigned, len(self.requests))
        echo = self.echoes[index] if self.echoes else ""
        prediction = request.prediction_ids
        answered: list[int] = []
        timing: RequestTiming | None = None
        decoder = self.decoders[index // self.num_per_prompt]
        source = text_deltas(
            chunks,
            decoder.new(),
            self.stops,
            decoder.special_stops,
            keep_end=self.keeps_end,
            keep_end_logprob=bool(self.echoes),
            on_failed=lambda chunk: self._note_failed(index, chunk),
        )
        async with aclosing(source) as deltas:
            async for delta in deltas:
                if self.progress.first_s is None:
                    self.progress.first_s = self.clock()
                if delta.usage is not None:
                    self.progress.usages[index] = delta.usage
                if delta.timing is not timing and delta.timing is not None:
                    timing = delta.timing
                    self.progress.timings[index] = (self.clock(), timing)
                if prediction:
                    answered += delta.token_ids
                    if delta.finish_reason is not None:
                        num_accepted = num_predicted_tokens(answered, prediction)
                        self.progress.predictions[index] = PredictionUsage(num_accepted, len(prediction) - num_accepted)
                yield index, delta._replace(text=echo + delta.text) if echo else delta
                echo = ""

    def _note_failed(self, index: int, chunk: TokenChunk) -> None:
        """A sequence failed; what its replica has computed for it, which may be only the prompt, is paid for."""
        if chunk.usage is not None and chunk.is_billed:
            self.progress.usages[index] = chunk.usage

    def _note_assigned(self) -> None:
        self.progress.num_assigned += 1
        if self.progress.num_assigned == len(self.requests):
            self.progress.assigned.set()

    async def _merge(self) -> AsyncGenerator[tuple[int, TextDelta]]:
        """Several sequences, each in a task of its own, merged in the order of arrival."""
        queue: asyncio.Queue[tuple[int, TextDelta] | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._run(index, queue)) for index in range(len(self.requests))]
        num_open = len(tasks)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item[1].finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, index: int, queue: asyncio.Queue[tuple[int, TextDelta] | Exception]) -> None:
        try:
            async for item in self._sequence_deltas(index):
                queue.put_nowait(item)
        except Exception as error:
            queue.put_nowait(error)  # raised by `_merge`
