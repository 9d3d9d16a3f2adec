"""Timing of decoding, the same for every decoder.

A `DecodeResult` has the tokens and the times of the steps in which every stream decodes: from the last stream's first
token to the first stream's end. Prefill is timed separately. Greedy, without end tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.engine import Engine
from app.engine.request import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """`prefill_s` is until the last stream's first token; each of `step_s` gave every stream one token."""

    token_ids: tuple[tuple[int, ...], ...]
    prefill_s: float
    step_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """All streams together, by the median step: on a shared machine a few steps wait for other processes."""
        return len(self.token_ids) / statistics.median(self.step_s)

    @property
    def mean_tokens_per_s(self) -> float:
        """All streams together, by the whole time."""
        return len(self.token_ids) * len(self.step_s) / sum(self.step_s)


class Decoder(Protocol):
    """Anything that can be timed."""

    def decode(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int | None], num_tokens: int) -> DecodeResult:
        """Generate `num_tokens` (at least 2) for every prompt."""
        ...


class EngineDecoder:
    """An engine of this project, called without threads, Ray or HTTP. `grammar`: of all answers; "" for free ones."""

    def __init__(self, engine: Engine, adapters: Sequence[LoraAdapter] = (), grammar: str = "") -> None:
        self._engine = engine
        self._adapters = adapters
        self._refs = [AdapterRef(f"adapter-{i}", a.card.digest, "bench") for i, a in enumerate(adapters)]
        self._grammar = grammar
        self._num_runs = 0

    def decode(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int | None], num_tokens: int) -> DecodeResult:
        self._num_runs += 1
        names = [f"{self._num_runs}-{i}" for i in range(len(prompts))]
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=not self._grammar, grammar=self._grammar
        )
        started = time.perf_counter()
        for name, prompt, index in zip(names, prompts, adapters, strict=True):
            ref, weights = (None, None) if index is None else (self._refs[index], self._adapters[index])
            self._engine.submit(GenerateRequest(name, "bench", tuple(prompt), sampling, ref), weights)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        opened, any_ended = 0.0, False
        step_s: list[float] = []
        live = set(names)
        while live:  # a request whose grammar is being compiled is no work yet
            before = time.perf_counter()
            chunks = self._engine.step()
            now = time.perf_counter()
            for chunk in chunks:
                if chunk.error is not None:
                    raise chunk.error
                tokens[chunk.request_id].extend(chunk.token_ids)
                if chunk.finish_reason is not None:
                    live.discard(chunk.request_id)
            if not opened:
                opened = now if all(tokens.values()) else 0.0
            elif not any_ended:
                step_s.append(now - before)
            any_ended = len(live) < len(names)
        if not step_s:
            raise ValueError(f"{num_tokens} tokens are too few: no step had all {len(prompts)} streams; ask for more")
        return DecodeResult(tuple(tuple(tokens[name]) for name in names), opened - started, tuple(step_s))
