"""The process that hosts vLLM: requests in, tokens out, as msgpack frames over a Unix socket.

It runs in vLLM's own environment and imports nothing of this project. The engine's process starts it with the number
of an inherited socket, speaks first and owns every decision; docs/reference/engine-protocol.md describes the frames.
When the socket closes, this process and vLLM's own end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec  # type: ignore[import-not-found]  # vLLM depends on it

PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 28
#: How often vLLM's own process is checked while no request reports its death.
HEALTH_INTERVAL_S = 1.0

Frame = dict[str, Any]


class Connection:
    """Frames on the socket: 4 bytes of length, big-endian, then a msgpack map with a "type"."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> Frame | None:
        """The next frame; None once the engine's process has closed the socket."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
            frame: Frame = msgspec.msgpack.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return frame

    def send(self, frame: Frame) -> None:
        packed = msgspec.msgpack.encode(frame)
        self._writer.write(len(packed).to_bytes(4, "big") + packed)

    async def flush(self) -> None:
        await self._writer.drain()


class Usage:
    """The last numbers of vLLM's scheduler; one of its stat loggers writes them."""

    def __init__(self) -> None:
        self.kv_usage = 0.0
        self.num_waiting = self.num_preemptions = 0

    def logger(self) -> Callable[..., Any]:
        """A class of stat loggers that write here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        usage = self

        class Recorder(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    usage.kv_usage = float(scheduler_stats.kv_cache_usage)
                    usage.num_waiting = int(scheduler_stats.num_waiting_reqs)
                if iteration_stats is not None:
                    usage.num_preemptions += int(iteration_stats.num_preempted_reqs)

            def log_engine_initialized(self) -> None:
                pass

        return Recorder


class Worker:
    """One vLLM engine and the requests in it."""

    def __init__(self, connection: Connection, llm: Any, usage: Usage) -> None:
        self._connection, self._llm, self._usage = connection, llm, usage
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._calling = asyncio.Lock()  # commands on adapters run in the order they arrive
        self._outputs: list[Frame] = []

    async def serve(self) -> None:
        """Answer frames until their stream ends. Raises what vLLM died of."""
        health = asyncio.create_task(self._watch_health())
        receiver = asyncio.create_task(self._receive())
        done, _ = await asyncio.wait({health, receiver}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _receive(self) -> None:
        while (frame := await self._connection.receive()) is not None:
            match frame["type"]:
                case "generate" | "embed":
                    self._tasks[frame["id"]] = asyncio.create_task(self._run(frame))
                case "abort":
                    for request_id in frame["ids"]:
                        if (task := self._tasks.pop(request_id, None)) is not None:
                            task.cancel()
                case "add_lora" | "remove_lora" | "pin_lora":
                    call = asyncio.create_task(self._call(frame))
                    self._calls.add(call)
                    call.add_done_callback(self._calls.discard)
                case other:
                    raise ValueError(f"unknown frame type {other!r}")

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._llm.check_health()

    async def _call(self, frame: Frame) -> None:
        """Carry out a command on adapters and answer it."""
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        error = None
        async with self._calling:
            try:
                if frame["type"] == "add_lora":
                    await self._llm.add_lora(LoRARequest(frame["name"], frame["lora_id"], frame["path"]))
                elif frame["type"] == "remove_lora":
                    await self._llm.remove_lora(frame["lora_id"])
                else:
                    await self._llm.pin_lora(frame["lora_id"])
            except EngineDeadError:
                return  # reported by `_watch_health`
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        self._connection.send({"type": "done", "call": frame["call"], "error": error})

    async def _run(self, frame: Frame) -> None:
        """Compute one request; its last output has a finish reason or an error."""
        from vllm.v1.engine.exceptions import EngineDeadError

        request_id = frame["id"]
        try:
            await (self._generate(frame) if frame["type"] == "generate" else self._embed(frame))
        except (asyncio.CancelledError, EngineDeadError):
            pass  # aborted: no output is expected; dead: `_watch_health` reports it for all
        except Exception as failure:
            cause = failure.__cause__ or failure
            kind = "invalid" if isinstance(cause, ValueError | TypeError) else "failed"
            self._emit({"id": request_id, "error": f"{type(cause).__name__}: {cause}", "kind": kind})
        finally:
            self._tasks.pop(request_id, None)

    async def _generate(self, frame: Frame) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        options = dict(frame["sampling"])
        if (grammar := options.pop("grammar", None)) is not None:
            options["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
        options["logit_bias"] = dict(options.pop("logit_bias", ())) or None
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False, **options)
        stream = self._llm.generate(_prompt(frame), params, frame["id"], lora_request=_lora_request(frame))
        async for output in stream:
            (completion,) = output.outputs
            last = {}
            if completion.finish_reason is not None:
                last = {"finish": completion.finish_reason}
            if params.prompt_logprobs is not None and output.prompt_logprobs:
                last["prompt_logprobs"] = _prompt_logprobs(frame, output.prompt_logprobs, params.prompt_logprobs)
            self._emit(
                {
                    "id": frame["id"],
                    "tokens": list(completion.token_ids),
                    "logprobs": _logprobs(completion, params.logprobs),
                    "cached": output.num_cached_tokens or 0,
                    **last,
                }
            )

    async def _embed(self, frame: Frame) -> None:
        from vllm.pooling_params import PoolingParams

        params = PoolingParams(task="embed", use_activation=False)
        async for output in self._llm.encode(_prompt(frame), params, frame["id"], lora_request=_lora_request(frame)):
            if output.finished:
                values = output.outputs.data.float().cpu().numpy().astype("<f4").tobytes()
                self._emit({"id": frame["id"], "embedding": values, "cached": 0, "finish": "stop"})

    def _emit(self, output: Frame) -> None:
        """Add an output to the frame that this turn of the event loop sends: one frame per step, not per request."""
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._send_outputs)
        self._outputs.append(output)

    def _send_outputs(self) -> None:
        outputs, self._outputs = self._outputs, []
        usage = self._usage
        self._connection.send(
            {
                "type": "outputs",
                "outputs": outputs,
                "kv_usage": usage.kv_usage,
                "num_waiting": usage.num_waiting,
                "num_preemptions": usage.num_preemptions,
            }
        )


def _prompt(frame: Frame) -> Any:
    prompt = {"prompt_token_ids": frame["token_ids"]}
    if frame["salt"]:
        prompt["cache_salt"] = frame["salt"]
    return prompt


def _lora_request(frame: Frame) -> Any:
    from vllm.lora.request import LoRARequest

    lora = frame["lora"]
    return None if lora is None else LoRARequest(lora["name"], lora["lora_id"], lora["path"])


def _logprobs(completion: Any, num_logprobs: int | None) -> list[Any]:
    """Per token: its log-probability, and (id, log-probability) of the most likely tokens, the first one first."""
    if num_logprobs is None or completion.logprobs is None:
        return []
    lines = []
    for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True):
        values = sorted(((-line.logprob, each) for each, line in found.items()))
        lines.append([found[token_id].logprob, [[each, -value] for value, each in values[:num_logprobs]]])
    return lines


def _prompt_logprobs(frame: Frame, found: Any, num_logprobs: int) -> list[Any]:
    """Per prompt token but the first: its log-probability, its rank, and the most likely tokens, best first."""
    lines = []
    for token_id, line in zip(frame["token_ids"][1:], found[1:], strict=True):
        own = line[token_id]
        values = sorted(((-other.logprob, each) for each, other in line.items()))
        lines.append([own.logprob, own.rank, [[each, -value] for value, each in values[:num_logprobs]]])
    return lines


def end_unless_loaded(theirs: socket.socket, is_loaded: threading.Event) -> None:
    """End this process and vLLM's own once the engine's process has closed the socket: while vLLM loads, for minutes,
    nothing else reads it, and the next replica needs the device."""
    while not is_loaded.wait(0.5):
        try:
            is_closed = not theirs.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # it is there, and says nothing
            is_closed = False
        except ConnectionError:  # it has not read our last frame
            is_closed = True
        if is_closed:
            os.killpg(0, signal.SIGTERM)


async def run(connection: Connection, arguments: Frame, is_loaded: threading.Event) -> None:
    """Load the model, say `ready`, and serve."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if "pooler_config" in arguments:
        from vllm.config import PoolerConfig

        arguments = arguments | {"pooler_config": PoolerConfig(**arguments["pooler_config"])}
    if current_platform.is_cpu():  # the processes that compute find it, as they have this one's path
        arguments = {"worker_extension_cls": "cpu_lora.CpuLora"} | arguments
    usage = Usage()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[usage.logger()])
    is_loaded.set()
    try:
        config = llm.vllm_config
        connection.send(
            {
                "type": "ready",
                "max_model_len": config.model_config.max_model_len,
                "block_size": config.cache_config.block_size,
                "num_kv_blocks": config.cache_config.num_gpu_blocks or 0,
                "vocab_size": config.model_config.get_vocab_size(),
            }
        )
        await Worker(connection, llm, usage).serve()
    finally:
        llm.shutdown()


async def main(descriptor: int) -> int:
    theirs = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=theirs)
    connection = Connection(reader, writer)
    start = await connection.receive()
    if start is None:
        return 0
    if start["protocol"] != PROTOCOL:
        message = f"this worker speaks protocol {PROTOCOL} and the engine speaks {start['protocol']}"
        connection.send({"type": "failed", "kind": "arguments", "error": message})
        await connection.flush()
        return 1
    is_loaded = threading.Event()
    threading.Thread(target=end_unless_loaded, args=(theirs, is_loaded), daemon=True).start()
    import vllm

    connection.send({"type": "hello", "protocol": PROTOCOL, "engine": "vllm", "version": vllm.__version__})
    try:
        await run(connection, start["arguments"], is_loaded)
    except Exception as failure:
        kind = "arguments" if isinstance(failure, TypeError | ValueError) else "died"
        connection.send({"type": "failed", "kind": kind, "error": f"{type(failure).__name__}: {failure}"})
        await connection.flush()
        raise
    finally:
        is_loaded.set()
    return 0


if __name__ == "__main__":
    try:
        status = asyncio.run(main(int(sys.argv[1])))
    finally:  # processes of vLLM's that still run are in this group, which the engine's process made
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpgrp() == os.getpid():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)
    sys.exit(status)
