"""Steps of the GPU engine on Llama-shaped models of random weights: the cost of adapters and of loading them.

Prints a Markdown table and writes a JSON file. Times are medians over interleaved rounds (`stats.py`) on one machine in
one run; ratios are taken within a round. Device times are of replayed graphs between two events; step times are the
host's clock around `Backend.forward`, sampling included.

    python -m load_tests.engine.bench_gpu --shape 8b --out results/bench_gpu_8b.json
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from app.engine.batch import ForwardBatch
from app.engine.config import CudaConfig, EngineConfig
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.graphs import Bucket
from app.engine.cuda.kernels import TRITON, Kernels
from app.engine.models.linear_modules import DENSE_TARGETS, target_shape
from app.engine.models.memory_estimate import kv_block_bytes, rank_row_bytes
from app.kernels import tuning
from load_tests.engine.llama_shapes import (
    BLOCK_SIZE,
    RANK,
    SHAPES,
    RandomAdapters,
    batch_of,
    model_spec,
    random_tensors,
)
from load_tests.stats import Spread, ratios, rounds, spread

#: The modules of adapters that are trained on q and v only, as many are.
QUERY_AND_VALUE = ("q_proj", "v_proj")


class Sizes(NamedTuple):
    """What is measured. `num_loads`: adapters written while steps are timed."""

    num_streams: int
    num_prompt: int
    num_adapters: int
    prefill_tokens: int
    prefill_adapters: int
    num_rounds: int
    num_steps: int
    num_loads: int


class Bench:
    """Backends of one shape and their measurements."""

    def __init__(self, name: str, device: torch.device, sizes: Sizes, kernels: Kernels = TRITON) -> None:
        self.spec = model_spec(name, SHAPES[name])
        self.sizes = sizes
        self.device = device
        self._kernels = kernels
        self._table_width = -(-max(sizes.num_prompt + 64, sizes.prefill_tokens) // BLOCK_SIZE)
        self.found: dict[str, Any] = {"shape": name, "sizes": sizes._asdict()}
        self._adapters = RandomAdapters(self.spec)
        self.engine = self._backend("engine", rows=RANK * (sizes.num_adapters + 4))
        self._write_all(self.engine)

    def _write_all(self, backend: CudaBackend, targets: Sequence[str] = DENSE_TARGETS) -> None:
        for index in range(self.sizes.num_adapters):
            backend.write_adapter(index + 1, RANK * index, self._adapters.adapter(index, targets))

    def bound(self, num_adapters: int, targets: Sequence[str] = DENSE_TARGETS) -> float:
        """A decode step's bytes with `num_adapters` adapters over the base's: weights, keys and values, rank rows."""
        layers = range(len(self.spec.layers))
        shapes = {target: [target_shape(self.spec, layer, target) for layer in layers] for target in DENSE_TARGETS}
        weights = sum(d_in * d_out for of in shapes.values() for d_in, d_out in of)
        weights += self.spec.vocab_size * self.spec.hidden_size
        per_token = kv_block_bytes(self.spec, 1, 1)
        base = weights + self.sizes.num_streams * (self.sizes.num_prompt + 1) * per_token
        rows = RANK * num_adapters * sum(d_in + d_out for target in targets for d_in, d_out in shapes[target])
        return (base + rows) / base

    def _backend(self, title: str, *, rows: int, batch_invariant: bool = False) -> CudaBackend:
        """Built, and timed: with its graphs, which are captured at start."""
        config = EngineConfig(
            num_kv_blocks=self.sizes.num_streams * self._table_width,
            block_size=BLOCK_SIZE,
            lora_pool_rows=rows,
            extra_weights_bytes=0,
            max_loras=self.sizes.num_adapters + 8,
            max_num_batched_tokens=max(self.sizes.prefill_tokens, self.sizes.num_streams),
            max_num_seqs=self.sizes.num_streams,
            cuda=CudaConfig(gpu_memory_utilization=0.45, batch_invariant=batch_invariant, skip_precompile=True),
        )
        started = time.perf_counter()
        tensors = random_tensors(self.spec, self.device)
        backend = CudaBackend(self.spec, tensors, config, self.device, self._kernels)
        self.found[f"{title}: start s"] = round(time.perf_counter() - started, 2)
        self.found[f"{title}: memory"] = str(backend.plan)
        return backend

    def decode_batch(self, num_adapters: int) -> ForwardBatch:
        """One token of every stream, behind a prompt; `num_adapters` take turns, 0 is the base."""
        count = self.sizes.num_streams
        slots = sorted(i % num_adapters + 1 if num_adapters else 0 for i in range(count))
        return batch_of([1] * count, [self.sizes.num_prompt] * count, slots, self._table_width, self.spec.vocab_size)

    def prefill_batch(self, num_adapters: int) -> ForwardBatch:
        count = self.sizes.prefill_adapters
        slots = [i % num_adapters + 1 if num_adapters else 0 for i in range(count)]
        length = self.sizes.prefill_tokens // count
        return batch_of([length] * count, [0] * count, sorted(slots), self._table_width, self.spec.vocab_size)

    def step_s(self, backend: CudaBackend, batch: ForwardBatch) -> float:
        """Median wall time of a step."""
        times = []
        for _ in range(self.sizes.num_steps):
            started = time.perf_counter()
            backend.forward(batch)
            times.append(time.perf_counter() - started)
        return spread(times).median

    def device_s(self, backend: CudaBackend, batch: ForwardBatch) -> float:
        """Mean time of a replayed graph on the device; the batch was sent by a step before."""
        backend.forward(batch)
        max_rank = RANK if batch.run_adapter_slots.any() else 0
        bucket = backend.graphs.bucket(len(batch.seq_lens), max_rank)
        assert bucket is not None
        return _device_s(self.device, partial(_replay, backend, bucket), self.sizes.num_steps)

    def decoding(self) -> None:
        """Measure decode steps: all adapters, one, enabled but unused; and batch-invariant mode."""
        off = self._backend("LoRA off", rows=0)
        cases = {
            "LoRA off": (off, self.decode_batch(0)),
            "base": (self.engine, self.decode_batch(0)),
            "1 adapter": (self.engine, self.decode_batch(1)),
            "8 adapters": (self.engine, self.decode_batch(8)),
            "all different": (self.engine, self.decode_batch(self.sizes.num_adapters)),
        }
        for backend, batch in cases.values():
            self.step_s(backend, batch)
        for clock, measure in (("device", self.device_s), ("step", self.step_s)):
            calls = {name: partial(measure, *case) for name, case in cases.items()}
            values = rounds(calls, self.sizes.num_rounds)
            self._note(f"decode, {clock}", values, {name: "base" for name in cases if name != "LoRA off"})
            self.found[f"decode, {clock}"]["ratio"]["base / LoRA off"] = _of(ratios(values["base"], values["LoRA off"]))
        self._write_all(self.engine, QUERY_AND_VALUE)
        few = {name: cases[name] for name in ("base", "all different")}
        for clock, measure in (("device", self.device_s), ("step", self.step_s)):
            values = rounds({name: partial(measure, *case) for name, case in few.items()}, self.sizes.num_rounds)
            self._note(f"decode, q and v, {clock}", values, {"all different": "base"})
        self._write_all(self.engine)
        self.found["bytes bound"] = {
            "all different": round(self.bound(self.sizes.num_adapters), 3),
            "1 adapter": round(self.bound(1), 4),
            "all different, q and v": round(self.bound(self.sizes.num_adapters, QUERY_AND_VALUE), 3),
        }
        off.close()
        del off, cases, few
        gc.collect()

    def prefill(self) -> None:
        """A step of prompts, each with another adapter, compared with the same step of the base."""
        base, adapted = self.prefill_batch(0), self.prefill_batch(self.sizes.prefill_adapters)
        calls = {
            "base": partial(self.step_s, self.engine, base),
            "adapters": partial(self.step_s, self.engine, adapted),
        }
        for call in calls.values():
            call()
        self._note("prefill, step", rounds(calls, self.sizes.num_rounds), {"adapters": "base"})

    def batch_invariant(self) -> None:
        """What fixed tiles cost."""
        fixed = self._backend("deterministic", rows=RANK * (self.sizes.num_adapters + 4), batch_invariant=True)
        self._write_all(fixed)
        for title, make in (("decode", self.decode_batch), ("prefill", self.prefill_batch)):
            for count in (0, self.sizes.num_adapters if title == "decode" else self.sizes.prefill_adapters):
                batch = make(count)
                calls = {
                    "fast": partial(self.step_s, self.engine, batch),
                    "fixed": partial(self.step_s, fixed, batch),
                }
                for call in calls.values():
                    call()
                name = f"deterministic {title}, {count} adapters"
                self._note(name, rounds(calls, self.sizes.num_rounds), {"fixed": "fast"})
        fixed.close()
        del fixed
        gc.collect()

    def loading(self) -> None:
        """Host → rows against the link's own rate; and steps while adapters are written one after the other."""
        num_bytes = RANK * rank_row_bytes(self.spec, 2)
        link = _link_bytes_per_s(self.device)
        apart = [self._adapters.adapter(1000 + i, apart=True) for i in range(4)]
        slot, row = self.sizes.num_adapters + 1, RANK * self.sizes.num_adapters
        times = []
        for adapter in apart * 3:
            started = time.perf_counter()
            self.engine.write_adapter(slot, row, adapter)
            while not self.engine.is_ready(slot):
                time.sleep(0)
            times.append(time.perf_counter() - started)
        load = spread(times)
        batch = self.decode_batch(self.sizes.num_adapters)
        alone = [self._timed_step(batch) for _ in range(self.sizes.num_loads * 4)]
        during: list[float] = []
        written = 0
        while written < self.sizes.num_loads:
            if self.engine.is_ready(slot):
                self.engine.write_adapter(slot, row, apart[written % len(apart)])
                written += 1
            during.append(self._timed_step(batch))
        self.found["loading"] = {
            "adapter bytes on the device": num_bytes,
            "adapter bytes on the host": apart[0].card.size_bytes,
            "link GB/s": round(link / 1e9, 2),
            "load ms": _of(Spread(*(1e3 * value for value in load))),
            "load / (bytes / link)": round(load.median * link / num_bytes, 3),
            "steps alone ms": _percentiles(alone),
            "steps during loads ms": _percentiles(during),
            "num loads": written,
            "median step during loads / alone": round(float(np.median(during) / np.median(alone)), 4),
            "p99 during / p99 alone": round(float(np.percentile(during, 99) / np.percentile(alone, 99)), 4),
        }

    def _timed_step(self, batch: ForwardBatch) -> float:
        started = time.perf_counter()
        self.engine.forward(batch)
        return time.perf_counter() - started

    def _note(self, title: str, values: dict[str, list[float]], references: dict[str, str]) -> None:
        self.found[title] = {
            "ms": {name: round(1e3 * spread(times).median, 4) for name, times in values.items()},
            "ratio": {
                f"{name} / {other}": _of(ratios(values[name], values[other]))
                for name, other in references.items()
                if name != other
            },
        }


#: Ratio in the JSON (title, key) -> what it must not exceed.
TARGETS_BY_RATIO: dict[tuple[str, str], float] = {
    ("decode, device", "all different / base"): 1.15,
    ("decode, device", "1 adapter / base"): 1.03,
    ("decode, device", "base / LoRA off"): 1.005,
    ("decode, q and v, device", "all different / base"): 1.15,
    ("decode, step", "all different / base"): 1.15,
    ("decode, step", "1 adapter / base"): 1.03,
    ("decode, step", "base / LoRA off"): 1.005,
    ("prefill, step", "adapters / base"): 1.05,
}


def run(
    name: str,
    device: torch.device,
    sizes: Sizes,
    kernels: Kernels = TRITON,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure everything; a part that fails is recorded with its error, and the others go on. `save` gets the results
    so far after each part."""
    bench = Bench(name, device, sizes, kernels)
    bench.found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    for part in (bench.decoding, bench.prefill, bench.loading, bench.batch_invariant):
        started = time.perf_counter()
        try:
            part()
        except Exception as error:  # recorded; the other parts still run
            bench.found[f"{part.__name__}: failed"] = f"{type(error).__name__}: {error}"
        bench.found[f"{part.__name__}: took s"] = round(time.perf_counter() - started, 1)
        save(bench.found)
    bench.engine.close()
    return bench.found


def table(found: dict[str, Any]) -> str:
    """The targets, one line each."""
    lines = [f"| Llama-{found['shape']} on {found['device']} | measured | target |", "|---|---:|---:|"]
    for (title, key), limit in TARGETS_BY_RATIO.items():
        ratio = found.get(title, {}).get("ratio", {}).get(key)
        ms = found.get(title, {}).get("ms", {}).get(key.partition(" / ")[0])
        shown = "not measured" if ratio is None else f"{ratio['median']:.3f} ({ms} ms)"
        lines.append(f"| {title}: {key} | {shown} | {limit} |")
    for name, bound in found.get("bytes bound", {}).items():
        lines.append(f"| what {name} / base would be by bytes alone | {bound} | |")
    loading = found.get("loading", {})
    lines.append(f"| adapter load / (bytes / link) | {loading.get('load / (bytes / link)', 'not measured')} | 2 |")
    during = loading.get("median step during loads / alone", "not measured")
    lines.append(f"| median step during loads / alone | {during} | 1.05 |")
    for title in (t for t in found if t.startswith("deterministic ") and isinstance(found[t], dict)):
        lines.append(f"| {title}: fixed / fast | {found[title]['ratio']['fixed / fast']['median']:.3f} | - |")
    failed = [f"{key}: {value}" for key, value in found.items() if key.endswith(": failed")]
    return "\n".join([*lines, *(f"| {line} | failed | |" for line in failed)])


def _replay(backend: CudaBackend, bucket: Bucket) -> None:
    backend.graphs.replay(bucket)


def _device_s(device: torch.device, launch: Callable[[], None], count: int) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(count):
            launch()
        return (time.perf_counter() - started) / count
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(count):
        launch()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3 / count


def _copy(host: torch.Tensor, there: torch.Tensor) -> None:
    there.copy_(host, non_blocking=True)


def _link_bytes_per_s(device: torch.device) -> float:
    """A pinned copy of 256 MiB to the device."""
    size = 256 << 20 if device.type == "cuda" else 1 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(3)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    there.copy_(host)
    times = [_device_s(device, partial(_copy, host, there), 3) for _ in range(5)]
    return size / spread(times).median


def _of(values: Spread) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values._asdict().items()}


def _percentiles(times: list[float]) -> dict[str, float]:
    points = {"median": 50, "p95": 95, "p99": 99, "max": 100}
    return {name: round(1e3 * float(np.percentile(times, point)), 4) for name, point in points.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Steps of the GPU engine on Llama-shaped models of random weights.")
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens before the one that is decoded")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=2048, help="prompt tokens of a prefill step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loads", type=int, default=40, help="adapters written while steps are timed")
    parser.add_argument("--tuned", type=Path, help="configurations of this device, put where the kernels read them")
    parser.add_argument("--out", type=Path, default=Path("results/bench_gpu.json"))
    given = parser.parse_args()
    if given.tuned is not None:
        shutil.copy(given.tuned, tuning.FOLDER / tuning.file_name(torch.cuda.get_device_name()))
    sizes = Sizes(
        given.streams, given.prompt, given.adapters, given.prefill, min(8, given.adapters), given.rounds, given.steps,
        given.loads,
    )  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)

    def save(found: dict[str, Any]) -> None:
        given.out.write_text(json.dumps(found, indent=1))

    print(table(run(given.shape, torch.device("cuda"), sizes, save=save)))


if __name__ == "__main__":
    main()
