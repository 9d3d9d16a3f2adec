"""A worker that speaks the engine protocol and computes tokens without a model.

A token is mixed from the prompt, the tokens before it, the seed and the contents of the adapter's folder as they were
when it was loaded, so a wrong id, a stale folder or a lost token gives another answer. It has `max_loras` slots like
vLLM. Fields of "fake" in the arguments make it misbehave: `step_s`, `start_error`, `crash_on_token`, `refuse_on_token`,
`garbage_on_token`, `fail_loads`. It says that `num_waiting` requests wait.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
import sys
import time
import zlib
from collections import OrderedDict
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import msgpack
from safetensors.numpy import load_file

PROTOCOL = 1
BLOCK_SIZE, NUM_BLOCKS = 16, 256
Frame = dict[str, Any]


class Request:
    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.known: list[int] = list(frame["token_ids"])
        self.num_new = 0
        self.is_started = False


class FakeWorker:
    def __init__(self, connection: socket.socket, arguments: Frame) -> None:
        self.connection, self.arguments = connection, arguments
        self.fake: Frame = arguments.get("fake", {})
        config = json.loads((Path(arguments["model"]) / "config.json").read_text())
        self.vocab_size, self.hidden_size = config["vocab_size"], config["hidden_size"]
        self.loaded: OrderedDict[int, int] = OrderedDict()  # lora id -> a checksum of its folder
        self.used_ids: set[int] = set()
        self.pinned: set[int] = set()
        self.running: dict[str, Request] = {}
        self.cached: set[tuple[Any, ...]] = set()
        self.pending = b""

    def send(self, frame: Frame) -> None:
        packed = msgpack.packb(frame)
        self.connection.sendall(len(packed).to_bytes(4, "big") + packed)

    def serve(self) -> None:
        step_s = self.fake.get("step_s", 0.001)
        while True:
            readable, _, _ = select.select([self.connection], [], [], 0 if self.running else None)
            if readable:
                data = self.connection.recv(1 << 20)
                if not data:
                    return
                self.pending += data
            while len(self.pending) >= 4 and len(self.pending) - 4 >= (size := int.from_bytes(self.pending[:4], "big")):
                frame = msgpack.unpackb(self.pending[4 : 4 + size])
                self.pending = self.pending[4 + size :]
                self.handle(frame)
            if self.running:
                time.sleep(step_s)
                self.step()

    def handle(self, frame: Frame) -> None:
        match frame["type"]:
            case "generate" | "embed":
                for name, token_id in self.fake.items():
                    if name.endswith("_on_token") and token_id in frame["token_ids"]:
                        return self.misbehave(name, frame)
                self.running[frame["id"]] = Request(frame)
            case "abort":
                for name in frame["ids"]:
                    self.running.pop(name, None)
            case "add_lora":
                self.send({"type": "done", "call": frame["call"], "error": self.add_lora(frame)})
            case "remove_lora":
                self.loaded.pop(frame["lora_id"], None)
                self.pinned.discard(frame["lora_id"])
                self.send({"type": "done", "call": frame["call"], "error": None})
            case "pin_lora":
                self.pinned.add(frame["lora_id"])
                self.send({"type": "done", "call": frame["call"], "error": None})
        return None

    def misbehave(self, name: str, frame: Frame) -> None:
        if name == "crash_on_token":
            self.send({"type": "failed", "kind": "died", "error": "EngineDeadError: the fake device is on fire"})
            sys.exit(1)
        if name == "refuse_on_token":
            self.outputs([{"id": frame["id"], "error": "ValueError: no such thing", "kind": "invalid"}])
        if name == "garbage_on_token":
            self.connection.sendall(b"\xff" * 64)

    def add_lora(self, frame: Frame) -> str | None:
        if self.fake.get("fail_loads"):
            return "ValueError: the fake device does not like it"
        lora_id = frame["lora_id"]
        if lora_id not in self.loaded:
            if lora_id in self.used_ids:
                return f"ValueError: id {lora_id} was used before"
            self.used_ids.add(lora_id)
            if len(self.loaded) >= self.arguments["max_cpu_loras"]:
                return f"RuntimeError: all {len(self.loaded)} places are taken"
            folder = Path(frame["path"])
            config = json.loads((folder / "adapter_config.json").read_text())
            tensors = load_file(folder / "adapter_model.safetensors")
            assert config["lora_alpha"] == config["r"] <= self.arguments["max_lora_rank"]
            assert all(config["r"] in tensor.shape for tensor in tensors.values())
            assert frame["name"] == folder.name
            self.loaded[lora_id] = zlib.crc32(b"".join(tensors[key].tobytes() for key in sorted(tensors)))
        return None

    def step(self) -> None:
        lines = []
        for name, request in list(self.running.items()):
            lines.append(self.token(request) if request.frame["type"] == "generate" else self.vector(request))
            if "finish" in lines[-1]:
                del self.running[name]
        self.outputs(lines)

    def outputs(self, lines: list[Frame]) -> None:
        used = sum(len(request.known) for request in self.running.values())
        usage = min(1.0, used / (NUM_BLOCKS * BLOCK_SIZE))
        numbers = {"kv_usage": usage, "num_waiting": self.fake.get("num_waiting", 0), "num_preemptions": 0}
        self.send({"type": "outputs", "outputs": lines, **numbers})

    def vector(self, request: Request) -> Frame:
        lora = request.frame["lora"]
        weights = 0 if lora is None else self.loaded[lora["lora_id"]]
        values = [mix(request.known, weights, 0, index) for index in range(self.hidden_size)]
        packed = struct.pack(f"<{len(values)}f", *values)
        return {"id": request.frame["id"], "embedding": packed, "cached": 0, "finish": "stop"}

    def token(self, request: Request) -> Frame:
        frame, options = request.frame, request.frame["sampling"]
        lora = frame["lora"]
        weights = 0 if lora is None else self.loaded[lora["lora_id"]]
        cached = 0
        if not request.is_started:
            request.is_started = True
            key = (lora and lora["name"], frame["salt"], *frame["token_ids"][:BLOCK_SIZE])
            cached = BLOCK_SIZE if key in self.cached and len(frame["token_ids"]) > BLOCK_SIZE else 0
            self.cached.add(key)
        seed = 0 if options["temperature"] == 0 else options["seed"] + 1
        bias = dict(options.get("logit_bias", ()))
        order = sorted(
            range(self.vocab_size), key=lambda each: (-bias.get(each, 0), mix(request.known, weights, seed, each))
        )
        prompt_lines = []
        if options.get("prompt_logprobs") is not None and request.num_new == 0:
            for index in range(1, len(request.known)):
                ranked = sorted(
                    range(self.vocab_size), key=lambda each: (mix(request.known[:index], weights, seed, each), each)
                )
                rank = ranked.index(request.known[index])
                top = [[each, -math.log(place + 2)] for place, each in enumerate(ranked[: options["prompt_logprobs"]])]
                prompt_lines.append([-math.log(rank + 2), rank + 1, top])
        stops = set(options["stop_token_ids"])
        is_early = request.num_new < options["min_tokens"]
        token_id = next(each for each in order if not (is_early and each in stops))
        request.known.append(token_id)
        request.num_new += 1
        line: Frame = {"id": frame["id"], "tokens": [token_id], "logprobs": [], "cached": cached}
        if prompt_lines:
            line["prompt_logprobs"] = prompt_lines
        if (count := options["logprobs"]) is not None:
            values = {each: -math.log(rank + 2) for rank, each in enumerate(order)}
            line["logprobs"] = [[values[token_id], [[each, values[each]] for each in order[:count]]]]
        if token_id in stops:
            line |= {"finish": "stop", "stop": token_id}
        elif request.num_new >= options["max_tokens"]:
            line |= {"finish": "length", "stop": None}
        return line


def mix(known: list[int], weights: int, seed: int, token_id: int) -> int:
    return zlib.crc32(repr((known, weights, seed, token_id)).encode())


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    size = int.from_bytes(connection.recv(4), "big")
    start = msgpack.unpackb(connection.recv(size, socket.MSG_WAITALL))
    worker = FakeWorker(connection, start["arguments"])
    worker.send({"type": "hello", "protocol": PROTOCOL, "engine": "fake", "version": "1"})
    print("WARNING 11-26 [fake.py:1] the fake says something", flush=True)
    if (error := worker.fake.get("start_error")) is not None:
        worker.send({"type": "failed", "kind": "arguments", "error": error})
        sys.exit(1)
    if worker.fake.get("shared_memory"):
        shared_memory.SharedMemory(f"polylora-test-{os.getpid()}", create=True, size=1 << 12)
    limit = start["arguments"].get("max_model_len", 256)
    sizes = {"block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS, "vocab_size": worker.vocab_size}
    worker.send({"type": "ready", "max_model_len": limit, **sizes})
    worker.serve()


if __name__ == "__main__":
    main()
