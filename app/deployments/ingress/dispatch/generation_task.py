"""One client request as it runs: its sequences, and their answers whole or as a merged stream.

In: requests that are ready for the engine, and where their tokens come from. Out: `SequenceOutput`s, or pieces of text as they
come. Rule: a job whose reader leaves, or one of whose sequences fails, ends all its sequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from app.deployments.ingress.dispatch.dispatcher import Dispatcher
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.semantic_router.decision import Decision
from app.deployments.ingress.serializers.detokenizer import Decoder, TextDelta, text_deltas
from app.deployments.ingress.serializers.tool_parser import ToolConfig
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.request import GenerateRequest, TokenLogprobs, Usage
from app.engine.spec_decode.ngram_proposer import num_predicted_tokens


@dataclass(slots=True)
class SequenceOutput:
    """One sequence's whole answer, gathered from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage


class PredictionUsage(NamedTuple):
    """Tokens of a prediction: those that the answer has where the prediction had them, and the others."""

    num_accepted: int
    num_rejected: int


@dataclass(slots=True)
class Progress:
    """When the first text of a job's first answer was there (Unix time), and what each sequence has cost so far.

    `foretold`: of each answer that has ended and was predicted.
    """

    first_s: float | None = None
    usages: dict[int, Usage] = field(default_factory=dict)
    foretold: dict[int, PredictionUsage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """The sequences of one client request: `num_per_prompt` (n) for each prompt, in order.

    `deadline_s` is a time of the event loop's clock; `clock` gives Unix time. `reservation` is what the job holds
    of its caller's limits. `tools`: how answers call tools, if they may. `echoes`: what each answer begins with, or ().
    `decision`: how the service has chosen the adapter, if it was to. `keeps_end`: answers keep their ending token.
    """

    request_id: str
    requests: tuple[GenerateRequest, ...]
    caller: Principal
    reservation: Reservation
    stops: tuple[str, ...]
    num_per_prompt: int
    deadline_s: float
    source: Dispatcher
    new_decoder: Callable[[], Decoder]
    clock: Callable[[], float]
    progress: Progress = field(default_factory=Progress)
    tools: ToolConfig | None = None
    echoes: tuple[str, ...] = ()
    decision: Decision | None = None
    keeps_end: bool = False

    @property
    def usages(self) -> list[Usage | None]:
        """What each sequence has cost so far; None before its first token."""
        return [self.progress.usages.get(index) for index in range(len(self.requests))]

    async def answers(self) -> list[SequenceOutput]:
        """All answers, whole. One failure ends all sequences of the request."""
        answers = [SequenceOutput() for _ in self.requests]
        async for index, delta in self.deltas():
            answers[index].add(delta)
        return answers

    def deltas(self) -> AsyncGenerator[tuple[int, TextDelta]]:
        """(sequence index, delta) as they come. Closing the generator aborts what still runs.

        Raises what a sequence raises, DeadlineExceeded among it.
        """
        return self._sequence(0) if len(self.requests) == 1 else self._merged()

    async def _sequence(self, index: int) -> AsyncGenerator[tuple[int, TextDelta]]:
        chunks = self.source.stream(self.requests[index], self.deadline_s)
        echo = self.echoes[index] if self.echoes else ""
        prediction = self.requests[index].prediction_ids
        answered: list[int] = []
        source = text_deltas(chunks, self.new_decoder(), self.stops, keep_end=self.keeps_end)
        async with aclosing(source) as deltas:
            async for delta in deltas:
                if self.progress.first_s is None:
                    self.progress.first_s = self.clock()
                if delta.usage is not None:
                    self.progress.usages[index] = delta.usage
                if prediction:
                    answered += delta.token_ids
                    if delta.finish_reason is not None:
                        num_accepted = num_predicted_tokens(answered, prediction)
                        self.progress.foretold[index] = PredictionUsage(num_accepted, len(prediction) - num_accepted)
                yield index, replace(delta, text=echo + delta.text) if echo else delta
                echo = ""

    async def _merged(self) -> AsyncGenerator[tuple[int, TextDelta]]:
        """Several sequences: a task each, because whichever has something is next."""
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
            async for item in self._sequence(index):
                queue.put_nowait(item)
        except Exception as error:
            queue.put_nowait(error)  # raised by whoever reads the job
