"""vLLM as an engine: our queue, adapter slots and books in front of vLLM's batches.

`VllmEngine` is an `Engine` whose step sends admitted requests to the worker and takes what has arrived from it; it
never waits for vLLM. `VllmEngineThread` runs it and ends the worker when it hangs.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.batch import ForwardOutput
from app.engine.config import EngineConfig, VllmConfig
from app.engine.engine import Engine
from app.engine.engine_thread import HUNG_FACTOR, EngineThread, OnChunks, OnFailure, StepWatchdog
from app.engine.errors import AdapterWriteFailed, ConfigError, EngineFailure, NotReady, UnsupportedField
from app.engine.models.checkpoint import Checkpoint
from app.engine.request import GenerateRequest, TokenChunk
from app.engine.request_validation import RequestValidator
from app.engine.scheduling.schedule import Schedule
from app.engine.sequence import Sequence
from app.engine.stats import EngineStats
from app.engine.vllm.adapter_slots import AdapterSlots, LoraName
from app.engine.vllm.scheduler import VllmScheduler, wire_id
from app.engine.vllm.worker_process import Frame, WorkerProcess

WORKER = Path(__file__).with_name("worker.py")
#: vLLM raises any positive temperature below this to this.
_VLLM_MIN_TEMPERATURE = 0.01
#: vLLM's seeds are signed.
MAX_SEED = (1 << 63) - 1


def open_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    on_chunks: OnChunks,
    on_failure: OnFailure | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> VllmEngineThread:
    """Start vLLM and wait until it has loaded the model. Raises ConfigError, OutOfDeviceMemory."""
    section = config.section(VllmConfig)
    inbound = _Inbound()
    command = [section.python, str(section.worker or WORKER)]
    process = WorkerProcess(
        command, worker_arguments(checkpoint, config), _environment(section), inbound.add, inbound.end
    )
    try:
        ready = process.wait_ready()
        if ready["vocab_size"] < checkpoint.spec.vocab_size:
            raise ConfigError(
                f"vLLM's model has {ready['vocab_size']} tokens but {checkpoint.spec.name!r} has "
                f"{checkpoint.spec.vocab_size}"
            )
        slots = AdapterSlots(checkpoint.spec, section, ready, process, inbound.wake)
    except BaseException:
        process.close()
        raise
    longest = min(ready["max_model_len"], checkpoint.spec.max_positions)
    budget = max(config.max_num_batched_tokens, config.max_num_seqs)  # vLLM has its own; ours bounds no place
    shared = config.model_copy(update={"max_model_len": longest, "max_num_batched_tokens": budget})
    engine = VllmEngine(slots, process, inbound, shared, clock)
    return VllmEngineThread(engine, on_chunks, on_failure)


def worker_arguments(checkpoint: Checkpoint, config: EngineConfig) -> Frame:
    """vLLM's `AsyncEngineArgs`."""
    section, folder = config.section(VllmConfig), checkpoint.tokenizer_source
    if not folder.is_dir():
        raise ConfigError(f"engine.vllm reads Hugging Face folders, and {str(folder)!r} is a file; use engine.cpu")
    if checkpoint.spec.encoder is not None:
        raise ConfigError(f"{checkpoint.spec.name!r} is an encoder, which engine.vllm does not serve; use engine.cpu")
    arguments: Frame = {
        "model": str(folder),
        "dtype": section.dtype,
        "tensor_parallel_size": section.tensor_parallel_size,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_lora": True,
        "max_loras": section.max_loras,
        "max_lora_rank": section.max_lora_rank,
        "max_cpu_loras": section.max_cpu_loras or section.max_loras,
        "generation_config": "vllm",  # requests say everything; nothing comes from the checkpoint
        "structured_outputs_config": {"backend": "guidance"},
        "skip_tokenizer_init": not (folder / "tokenizer.json").is_file(),
    }
    if section.runner == "pooling":
        pooler = {"seq_pooling_type": checkpoint.spec.pooling.upper(), "use_activation": False}  # we normalise
        arguments |= {"runner": "pooling", "convert": "embed", "pooler_config": pooler}
    if config.max_model_len:
        arguments["max_model_len"] = config.max_model_len
    if section.quantization:
        arguments["quantization"] = section.quantization
    if section.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if any(layer.experts is not None for layer in checkpoint.spec.layers):
        arguments["enable_mixed_moe_lora_format"] = True  # adapters have a pair per expert, for every family
    return arguments | section.extra_args


def _environment(section: VllmConfig) -> dict[str, str]:
    return {
        "VLLM_BATCH_INVARIANT": str(int(section.batch_invariant)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder of this machine
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }


class _Inbound:
    """Outputs of the worker that no step has read, and its end. Written by the process's threads."""

    def __init__(self) -> None:
        self._outputs: deque[Frame] = deque()
        self.failure: EngineFailure | None = None
        self.news = threading.Event()
        self.on_work: Callable[[], None] = lambda: None
        self.on_done: Callable[[Frame], None] = lambda _: None

    def add(self, frame: Frame) -> None:
        """A frame has arrived."""
        match frame["type"]:
            case "outputs":
                self._outputs.append(frame)
                self.wake()
            case "done":
                self.on_done(frame)
            case other:
                raise ValueError(f"unknown frame type {other!r}")

    def end(self, failure: EngineFailure) -> None:
        """The worker has ended, or has to."""
        if self.failure is None:
            self.failure = failure
        self.wake()

    def wake(self) -> None:
        self.news.set()
        self.on_work()

    def take(self) -> list[Frame]:
        return [self._outputs.popleft() for _ in range(len(self._outputs))]


class VllmEngine(Engine):
    """An `Engine` whose sequences run in vLLM."""

    scheduler_kind = VllmScheduler

    def __init__(
        self,
        slots: AdapterSlots,
        process: WorkerProcess,
        inbound: _Inbound,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(slots, config, clock)
        self._slots, self.process, self._inbound = slots, process, inbound
        assert isinstance(self._scheduler, VllmScheduler)
        self._vllm = self._scheduler
        self._vllm.take_outputs = inbound.take
        self._check = RequestValidator(
            self.spec, self._adapters.limits, slots.limits, None, self.max_model_len, has_grammars=True
        )
        inbound.on_done, inbound.on_work = slots.on_done, self._wake_thread
        self.progress = StepWatchdog(time.monotonic)
        self._is_measuring = self._has_more = False
        self._new_pins: Collection[str] | None = None
        #: Whether a step with nothing to do waits for news: for callers that step in a loop.
        self.waits = False

    def submit(self, request: GenerateRequest, adapter: LoraAdapter | None = None) -> None:
        """See `Engine.submit`. UnsupportedField for what vLLM would compute otherwise than it was asked."""
        self._check_runner(request)
        sampling = request.sampling
        if 0 < sampling.temperature < _VLLM_MIN_TEMPERATURE:
            raise UnsupportedField(
                f"temperature is {sampling.temperature} but engine.vllm takes 0 (greedy) or at least "
                f"{_VLLM_MIN_TEMPERATURE}",
                param="temperature",
            )
        if sampling.grammar and request.resume_token_ids:
            raise NotReady("an answer with a grammar cannot be continued after its engine has ended; send it again")
        if sampling.grammar_prefix:
            raise UnsupportedField("engine.vllm continues no message with a grammar", param="continue_final_message")
        if sampling.grammar_tokens:
            raise UnsupportedField(
                "engine.vllm has grammars over the base model's tokens only, and the adapter adds tokens",
                param="structured_outputs",
            )
        if sampling.grammar:
            lark_of(sampling.grammar)
            if sampling.eos_token_ids is not None:  # vLLM's grammars end with the model's own tokens
                ends = tuple(dict.fromkeys((*sampling.eos_token_ids, *self.spec.eos_token_ids)))
                request = replace(request, sampling=replace(sampling, eos_token_ids=ends))
        super().submit(request, adapter)

    def _check_runner(self, request: GenerateRequest) -> None:
        """vLLM either generates or embeds, and pools in one way. Raises UnsupportedField."""
        if request.pooling is None and self.only_embeds:
            raise UnsupportedField("engine.vllm.runner is pooling: it computes embeddings, not text", param="model")
        if request.pooling is not None and not self.only_embeds:
            raise UnsupportedField(
                "engine.vllm computes embeddings with engine.vllm.runner: pooling only", param="pooling"
            )
        if request.pooling is not None and request.pooling.method != self.spec.pooling:
            raise UnsupportedField(
                f"pooling is {request.pooling.method!r} but engine.vllm pools as the checkpoint says: "
                f"{self.spec.pooling!r}",
                param="pooling",
            )

    def pin_adapters(self, digests: Collection[str]) -> None:
        self._new_pins = frozenset(digests)
        super().pin_adapters(digests)

    def load_adapter(self, adapter: LoraAdapter, ref: AdapterRef) -> Future[int]:
        """See `Engine.load_adapter`; the result comes when vLLM has loaded it."""
        answer: Future[int] = Future()
        granted = super().load_adapter(adapter, ref)
        granted.add_done_callback(lambda _: self._answer_load(adapter.card.digest, granted, answer))
        return answer

    def _answer_load(self, digest: str, granted: Future[int], answer: Future[int]) -> None:
        """Answer a load command that has its slot, or an error, once vLLM has answered, too."""
        loading = self._slots.loading(digest) if granted.exception() is None else None

        def answer_now(_: object = None) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            error = granted.exception() or (loading.exception() if loading is not None else None)
            if error is None:
                answer.set_result(granted.result())
                return
            answer.set_exception(error)
            if loading is not None:
                super(VllmEngine, self).unload_adapter(digest)  # nothing is in the slot

        if loading is None:
            answer_now()
        else:
            loading.add_done_callback(answer_now)

    @property
    def only_embeds(self) -> bool:
        return self.can_embed

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: vLLM's requests make none until their outputs arrive."""
        return bool(self._inbox) or self._has_more or self._inbound.news.is_set()

    @property
    def computing(self) -> list[str]:
        """Ids of the requests in vLLM."""
        return [sequence.request_id for sequence in self._vllm.sent.copy().values()]

    def stats(self) -> EngineStats:
        found, usage = super().stats(), self._vllm.usage
        num_waiting = min(usage.num_waiting, found.num_running)  # in vLLM's own queue: it lacks KV memory
        return replace(
            found,
            num_blocks_free=round((1 - usage.kv_usage) * found.num_blocks),
            num_running=found.num_running - num_waiting,
            num_waiting=found.num_waiting + num_waiting,
            engine=self.process.engine_name,
        )

    def step(self) -> list[TokenChunk]:
        """Send what may enter vLLM, and return the chunks of what has arrived."""
        if self.waits and not self.has_work:
            self._inbound.news.wait(1.0)
        failure, had_news = self._inbound.failure, self._inbound.news.is_set()
        self._inbound.news.clear()
        if failure is not None:
            if self.process.has_failed and not failure.computing:
                failure = EngineFailure(str(failure), computing=self.computing)
            return self.shut_down(failure)
        if (pins := self._new_pins) is not None:
            self._new_pins = None
            self._slots.pin(pins)
        num_writes = self._slots.num_writes
        chunks = super().step()
        schedule = self._schedule
        has_scheduled = schedule is not None and bool(schedule.admitted_ids or schedule.refusals)
        self._has_more = bool(chunks) or has_scheduled or self._slots.num_writes != num_writes
        self._measure(had_news=had_news)
        return chunks

    def fail(self, failure: EngineFailure) -> None:
        """End the worker at once; the next step ends all requests with this failure. Any thread."""
        self._inbound.end(failure)
        self.process.kill()

    def shut_down(self, reason: EngineFailure) -> list[TokenChunk]:
        self._slots.fail()
        return super().shut_down(reason)

    def _wake_thread(self) -> None:
        self.on_work()  # the thread that steps sets it after this engine is made

    def _abort(self, request_id: str) -> TokenChunk | None:
        sequence = self._vllm.live.get(request_id)
        if sequence is not None and self._vllm.sent.pop(wire_id(sequence), None) is not None:
            self.process.send({"type": "abort", "ids": [wire_id(sequence)]})
        return super()._abort(request_id)

    def _forward(self, schedule: Schedule) -> ForwardOutput | None:
        """Send the sequences whose adapter vLLM has; None, as their outputs come later."""
        for sequence, _ in schedule.items:
            with contextlib.suppress(AdapterWriteFailed):  # the next step ends the adapter's requests
                if self._slots.is_ready(sequence.adapter_slot):
                    self._vllm.mark_sent(sequence)
                    self.process.send(_generate_frame(sequence, self._slots.name_of(sequence.adapter_slot)))
        return None

    def _measure(self, *, had_news: bool) -> None:
        """Measure how long vLLM takes between signs of progress while it has work."""
        is_busy = bool(self._vllm.sent) or self._slots.num_calls > 0
        if self._is_measuring and (had_news or not is_busy):
            self.progress.end()
            self._is_measuring = False
        if is_busy and not self._is_measuring:
            self.progress.begin()
            self._is_measuring = True


class VllmEngineThread(EngineThread):
    """Runs a `VllmEngine`."""

    def __init__(self, engine: VllmEngine, on_chunks: OnChunks, on_failure: OnFailure | None = None) -> None:
        super().__init__(engine, on_chunks, on_failure)
        self._vllm = engine

    def warm_up(self) -> None:
        self._vllm.waits = True
        super().warm_up()
        self._vllm.waits = False

    def check_progress(self, max_step_s: float) -> bool:
        """Report the engine as failed if vLLM makes no progress, and end its process. True the first time."""
        if super().check_progress(max_step_s):
            self._vllm.process.kill()
            return True
        age_s, usual_s = self._vllm.progress.age_s(), self._vllm.progress.usual_s
        if self.failure is not None or age_s <= max(max_step_s, HUNG_FACTOR * usual_s):
            return False
        reason = f"vLLM has shown no progress for {age_s:.0f} s; it usually takes {usual_s:.3g} s: it hangs"
        failure = EngineFailure(reason, computing=self._vllm.computing)
        is_first = self._fail(failure)
        self._vllm.fail(failure)
        return is_first


def lark_of(grammar: str) -> str:
    """The Lark text that vLLM's guidance backend takes.

    `grammar`: llguidance's JSON with one grammar, or Lark already. Raises UnsupportedField for JSON with several.
    """
    if not grammar.startswith("{"):
        return grammar
    grammars = json.loads(grammar)["grammars"]
    if len(grammars) != 1:
        raise UnsupportedField("engine.vllm takes one grammar per request", param="structured_outputs")
    schema, lark = grammars[0].get("json_schema"), grammars[0].get("lark_grammar")
    return f"%llguidance {{}}\nstart: %json {json.dumps(schema)}" if lark is None else lark


def _generate_frame(sequence: Sequence, lora: LoraName | None) -> Frame:
    """A request as the worker takes it. Resumed tokens are part of the prompt."""
    request, sampling = sequence.request, sequence.request.sampling
    given: Frame = {
        "id": wire_id(sequence),
        "token_ids": [*request.token_ids, *request.resume_token_ids],
        "lora": lora.frame() if lora is not None else None,
        "salt": request.cache_salt.hex(),
    }
    if request.pooling is not None:
        return {"type": "embed", **given}
    num_resumed = len(request.resume_token_ids)
    options: Frame = {
        "max_tokens": max(1, sampling.max_tokens - num_resumed),  # 0, for the prompt's log-probabilities: one too many
        "min_tokens": max(0, sampling.min_tokens - num_resumed),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed & MAX_SEED,
        "stop_token_ids": sorted(sequence.stop_ids),
        "ignore_eos": True,  # the ends are among the stop tokens unless the request ignores them
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.num_logprobs,
    }
    if sampling.logit_bias:
        options["logit_bias"] = [list(pair) for pair in sampling.logit_bias]
    if sequence.wants_prompt_logprobs:
        options["prompt_logprobs"] = sampling.prompt_logprobs
    if sampling.grammar:
        options["grammar"] = lark_of(sampling.grammar)
    return {"type": "generate", "sampling": options, **given}
