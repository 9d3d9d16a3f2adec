"""A CUDA device in name only: the engine's code for one runs on the CPU, and every order it relies on has to be made.

In: a monkeypatch. Out: a `Simulated`, which stands for `torch.cuda` and the engine's threads. Everything is computed at
once, in the order it is asked for; what may run at the same time on a device is found by vector clocks (Lamport 1978;
Mattern 1989). Streams and host threads have one each; launches, events and futures pass them on. Two uses of one
memory, at least one of them a write, that no chain of these puts in order are a race, whenever they happened to run.
Watched are pinned memory, a step's arrays and adapters' rows. A device's allocations are counted, and can be refused.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

from app.engine.cuda import adapters as gpu_adapters
from app.engine.cuda import backend as gpu_backend
from app.engine.cuda import step as gpu_step

DEVICE = torch.device("cuda", 0)
DEFAULT = "default stream"


class Use(NamedTuple):
    """Who used a memory, when by its own clock, and how. Parts lie side by side; None is all of it."""

    actor: str
    time: int
    is_write: bool
    part: int | None


class Simulated:
    """One device. `races` stays empty while everything is in order."""

    def __init__(self, free_bytes: int, total_bytes: int) -> None:
        self.memory = free_bytes, total_bytes
        self.num_allocated = 0
        self.limit_bytes = total_bytes
        self.races: list[str] = []
        self.clocks: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.streams_of_writes: set[str] = set()
        self.host, self.current = "engine's thread", DEFAULT
        self.capturing: Graph | None = None
        self.pinned: dict[int, str] = {}  # address -> name
        self._uses: defaultdict[str, list[Use]] = defaultdict(list)
        self._num_named: Counter[str] = Counter()

    def name(self, kind: str) -> str:
        self._num_named[kind] += 1
        return f"{kind} {self._num_named[kind]}"

    def use(self, actor: str, memory: str, *, write: bool, part: int | None = None) -> None:
        now = self.clocks[actor]
        now[actor] += 1
        for earlier in self._uses[memory]:
            is_apart = part != earlier.part and None not in (part, earlier.part)
            if not is_apart and (write or earlier.is_write) and now[earlier.actor] < earlier.time:
                self.races.append(f"{memory}: {actor} against {earlier}")
        self._uses[memory].append(Use(actor, now[actor], write, part))

    def launch(self, memory: str, *, write: bool) -> None:
        """A use by the current stream, after all that the launching thread knows of; in a capture, by its replays."""
        if self.capturing is not None:
            self.capturing.uses.append((memory, write))
            return
        self.clocks[self.current] |= self.clocks[self.host]
        self.use(self.current, memory, write=write)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Event:
    def __init__(self, simulated: Simulated) -> None:
        self._simulated = simulated
        self._clock: Counter[str] = Counter()

    def record(self) -> None:
        simulated = self._simulated
        self._clock = simulated.clocks[simulated.current] | simulated.clocks[simulated.host]

    def wait(self) -> None:
        self._simulated.clocks[self._simulated.current] |= self._clock

    def synchronize(self) -> None:
        assert self._simulated.capturing is None, "nothing may wait in a capture"
        self._simulated.clocks[self._simulated.host] |= self._clock

    def query(self) -> bool:
        return True


class Stream:
    def __init__(self, simulated: Simulated, name: str) -> None:
        self._simulated, self.name = simulated, name

    def record_event(self) -> Event:
        event = Event(self._simulated)
        with self._simulated.stream(self):
            event.record()
        return event

    def wait_stream(self, other: Stream) -> None:
        self._simulated.clocks[self.name] |= self._simulated.clocks[other.name] | self._simulated.clocks[self._host]

    def synchronize(self) -> None:
        self._simulated.clocks[self._host] |= self._simulated.clocks[self.name]

    @property
    def _host(self) -> str:
        return self._simulated.host


class Graph:
    """What is captured uses its memory in `replay` only."""

    def __init__(self, simulated: Simulated) -> None:
        self._simulated = simulated
        self.uses: list[tuple[str, bool]] = []
        self.run: Callable[[], None] | None = None

    def capture_begin(self, **_: object) -> None:
        simulated = self._simulated
        assert simulated.current != DEFAULT, "CUDA does not capture the default stream"
        assert simulated.clocks[simulated.current] <= simulated.clocks[simulated.host], "what was warmed up has ended"
        simulated.capturing = self

    def capture_end(self) -> None:
        self._simulated.capturing = None

    def replay(self) -> None:
        assert self.run is not None
        now = self._simulated.capturing = Graph(self._simulated)
        self.run()
        self._simulated.capturing = None
        for memory, write in now.uses:  # adapters are data: what is used is another's every time
            self._simulated.launch(memory, write=write)


class Worker:
    """An executor whose work is done at once, by a thread that knows what its submitter knew."""

    def __init__(self, simulated: Simulated, _num_threads: int, name: str) -> None:
        self._simulated, self._name = simulated, name

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Done:
        simulated = self._simulated
        outside = simulated.host, simulated.current
        host = simulated.name(self._name)
        simulated.clocks[host] |= simulated.clocks[simulated.host]
        simulated.host = host
        if outside[0] == "engine's thread":
            simulated.current = DEFAULT  # the current stream is a thread's own
        value = work(*arguments)
        simulated.host, simulated.current = outside
        return Done(simulated, host, value)

    def shutdown(self) -> None:
        pass


class Done(NamedTuple):
    """A future of a `Worker`."""

    simulated: Simulated
    host: str
    value: Any

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        self.simulated.clocks[self.simulated.host] |= self.simulated.clocks[self.host]
        return self.value


class _OnCpu(TorchFunctionMode):
    """Tensors of the device are the CPU's; copies are launches that read pinned memory."""

    def __init__(self, simulated: Simulated) -> None:
        super().__init__()
        self._simulated = simulated

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        on_device = getattr(kwargs.get("device"), "type", None) == "cuda"
        if on_device:
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(arg, torch.device) and arg.type == "cuda" else arg for arg in args)
        pinned = kwargs.pop("pin_memory", False)
        found = function(*args, **kwargs)
        simulated = self._simulated
        if on_device and isinstance(found, torch.Tensor):
            simulated.num_allocated += found.nbytes
            if simulated.num_allocated > simulated.limit_bytes:
                raise torch.OutOfMemoryError(f"tried to allocate {found.nbytes} bytes")
        if pinned:
            simulated.pinned[found.untyped_storage().data_ptr()] = simulated.name("pinned memory")
        if function is torch.Tensor.copy_ and (name := simulated.pinned.get(args[1].untyped_storage().data_ptr())):
            simulated.launch(name, write=False)
        return found


@contextmanager
def simulated_cuda(
    patch: pytest.MonkeyPatch, free_bytes: int = 1 << 40, total_bytes: int = 1 << 40
) -> Iterator[Simulated]:
    """The engine's CUDA code runs inside, on `DEVICE`."""
    simulated = Simulated(free_bytes, total_bytes)
    default = Stream(simulated, DEFAULT)
    for name, stand_in in {
        "Event": lambda: Event(simulated),
        "Stream": lambda _device: Stream(simulated, simulated.name("stream")),
        "CUDAGraph": lambda: Graph(simulated),
        "current_stream": lambda _device: default,
        "stream": simulated.stream,
        "device": _nothing,
        "graph_pool_handle": lambda: None,
        "mem_get_info": lambda _device: simulated.memory,
        "empty_cache": lambda: None,
    }.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(gpu_adapters, "ThreadPoolExecutor", lambda count, name: Worker(simulated, count, name))
    _watch(patch, simulated)
    with _OnCpu(simulated):
        yield simulated


def _watch(patch: pytest.MonkeyPatch, simulated: Simulated) -> None:
    """Note who uses what beside copies: threads pinned memory, steps their arrays and adapters, writes the rows."""
    round_rows, views = gpu_adapters.round_rows, gpu_step._views
    send, send_all = gpu_step.StepVector.send, gpu_adapters.AdapterTables._send_all
    hidden_states, run_bucket = gpu_backend.CudaDecoder.hidden_states, gpu_backend.CudaBackend._run_bucket

    def watched_round_rows(tasks: Any, first: int, end: int, row_size: int, bits: Any) -> None:
        name = simulated.pinned.get(bits.ctypes.data, "memory that is not pinned")
        simulated.use(simulated.host, name, write=True, part=tasks.ctypes.data)  # each thread its own tensors
        round_rows(tasks, first, end, row_size, bits)

    def watched_views(flat: Any, shape: Any) -> Any:
        if not isinstance(flat, torch.Tensor):
            simulated.use(simulated.host, simulated.pinned[flat.ctypes.data], write=True)
        return views(flat, shape)

    def watched_send(self: Any, *arguments: Any) -> Any:
        found = send(self, *arguments)
        simulated.launch("a step's arrays", write=True)
        return found

    def watched_send_all(self: Any, adapter_slot: int, *arguments: Any) -> None:
        simulated.streams_of_writes.add(simulated.current)
        send_all(self, adapter_slot, *arguments)
        simulated.launch(f"rows of slot {adapter_slot}", write=True)

    def watched_hidden_states(self: Any, step: Any, *arguments: Any) -> Any:
        simulated.launch("a step's arrays", write=False)
        if step.max_rank:
            for adapter_slot in sorted(set(step.adapter_slots.tolist()) - {0}):
                simulated.launch(f"rows of slot {adapter_slot}", write=False)
        return hidden_states(self, step, *arguments)

    def watched_run_bucket(self: Any, bucket: Any) -> None:
        if simulated.capturing is not None:
            simulated.capturing.run = lambda: run_bucket(self, bucket)
        run_bucket(self, bucket)

    patch.setattr(gpu_adapters, "round_rows", watched_round_rows)
    patch.setattr(gpu_step, "_views", watched_views)
    patch.setattr(gpu_step.StepVector, "send", watched_send)
    patch.setattr(gpu_adapters.AdapterTables, "_send_all", watched_send_all)
    patch.setattr(gpu_backend.CudaDecoder, "hidden_states", watched_hidden_states)
    patch.setattr(gpu_backend.CudaBackend, "_run_bucket", watched_run_bucket)


@contextmanager
def _nothing(_device: object) -> Iterator[None]:
    yield
