"""Speed of the GPU kernels, compared with the machine's bounds and with other libraries' ways. One command, no Ray.

First every form is checked against float64 in bf16, float16 and float32, and batch-invariant mode bit for bit; then the
machine's own bandwidth (a copy, bytes read and written) and matrix rate (a bf16 product of 8192) are measured; then
forms that pass their check once more are timed, inside CUDA graphs and over enough layers that memory is read and not
the cache. Cells run in order of interest until the budget of seconds is spent; the output lists the others. Without a
GPU the checks run tiny in Triton's interpreter and nothing is timed.

    python -m load_tests.kernels.bench_kernels --budget-s 480 --json kernels.json
    python -m load_tests.kernels.bench_kernels --tune           # write the best configurations into app/kernels/tuned/
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton  # noqa: E402

from app.kernels.matmul import triton as matmul  # noqa: E402
from app.kernels.paged_attention import triton as attention  # noqa: E402
from load_tests.kernels import lora_forms  # noqa: E402
from load_tests.kernels.gpu_timing import Ceilings, Clock, ceilings, event_seconds, graph_seconds  # noqa: E402
from load_tests.kernels.kernel_checks import Line, attempt, attention_case, checks, dense  # noqa: E402
from load_tests.kernels.lora_forms import TOLERANCE, Sizes, Workload  # noqa: E402
from load_tests.kernels.tune_kernels import main_path, tune  # noqa: E402

SHAPES = ((4096, 14336), (14336, 4096), (2048, 8192), (8192, 2048))
RANKS = ((16,), (8, 16, 64), (64,), (8,))
BATCHES = (64, 1, 16, 256)
OURS = ("bgmv", "sgmv", "deterministic")
#: Bytes above which a decode kernel should come within 0.7 of the bandwidth bound.
LARGE_BYTES = 64 << 20
#: Bytes of weights that take turns in a product.
_COLD_BYTES = 256 << 20
BF16 = torch.bfloat16
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def lora_cells() -> Iterator[Sizes]:
    """The grid, what is asked about most first: rank 16 of the 8B shape, then other shapes, then other ranks."""
    for ranks, (depth, width), num_rows in product(RANKS, SHAPES, BATCHES):
        for num_adapters in sorted({n for n in (1, 4, 64, num_rows) if n <= num_rows}):
            yield Sizes(depth, width, ranks, num_rows, num_adapters)


def time_lora(sizes: Sizes, rates: Ceilings, names: Iterable[str]) -> Iterator[Line]:
    """One line per form: seconds per layer, and what part of the bounds that is."""
    workload = Workload(sizes, lora_forms.cold_layers(sizes), BF16, DEVICE)
    for name in names:
        line: Line = {"kind": "lora", "form": name, **sizes.__dict__, "bytes": sizes.num_bytes(2), "graph": True}
        yield attempt(line, partial(_time_form, workload, name, rates))


def _time_form(workload: Workload, name: str, rates: Ceilings) -> Line:
    sizes = workload.sizes
    # A loop over hundreds of adapters and layers is a graph of tens of thousands of nodes.
    layers = min(workload.num_layers, max(1, 512 // sizes.num_adapters)) if name == "loop" else workload.num_layers
    form = lora_forms.FORMS[name](workload)
    error = lora_forms.check(workload, form)
    if not error < TOLERANCE[BF16]:
        return {"error": error, "passed": False}
    seconds = graph_seconds(partial(lora_forms.all_layers, form, workload, layers)) / layers
    return {
        "error": error,
        "layers": layers,
        "seconds": seconds,
        "of_bandwidth": sizes.num_bytes(2) / seconds / rates.bandwidth,
        "of_matrix_rate": sizes.num_operations / seconds / rates.matrix,
    }


def time_peft(sizes: Sizes) -> Iterator[Line]:
    """PEFT's mixed batch, launched eagerly as it runs (it indexes with lists), less its base product."""
    line: Line = {"kind": "lora", "form": "PEFT", **sizes.__dict__, "graph": False}
    yield attempt(line, partial(_time_peft, sizes))


def _time_peft(sizes: Sizes) -> Line:
    workload = Workload(sizes, 1, BF16, DEVICE)
    add, base = lora_forms.peft(workload)
    with torch.inference_mode():
        workload.y[0] = base(workload.x[0])
        error = lora_forms.check(workload, add)
        if not error < TOLERANCE[BF16]:
            return {"error": error, "passed": False}
        out = torch.empty_like(workload.y[0])
        both_s, base_s = event_seconds(lambda: add(0, out)), event_seconds(lambda: base(workload.x[0]))
    return {"error": error, "seconds": both_s - base_s, "base_seconds": base_s}


def time_attention(num_sequences: int, num_queries: int, length: int, rates: Ceilings) -> Iterator[Line]:
    """Ours, deterministic, and torch's attention over keys in one piece, which it does not have to look up."""
    q, keys, values, arguments = attention_case(BF16, DEVICE, num_sequences, num_queries, length)
    out = torch.empty_like(q)
    k, v = (dense(t, arguments["block_tables"], length).contiguous() for t in (keys, values))
    dense_q = q.view(num_sequences, num_queries, 32, -1).transpose(1, 2).contiguous()
    torch_attention = torch.nn.functional.scaled_dot_product_attention
    forms: dict[str, Callable[[], object]] = {
        "ours": lambda: attention.paged_attention(q, keys, values, out=out, **arguments),
        "deterministic": lambda: attention.paged_attention(q, keys, values, out=out, batch_invariant=True, **arguments),
        "torch dense": lambda: torch_attention(dense_q, k, v, enable_gqa=True, is_causal=num_queries == length),
    }
    num_bytes = k.nbytes + v.nbytes + 2 * q.nbytes
    num_operations = 4 * 32 * 128 * num_sequences * sum(range(length - num_queries + 1, length + 1))

    def time_form(form: Callable[[], object]) -> Line:
        seconds = graph_seconds(form)
        return {
            "seconds": seconds,
            "of_bandwidth": num_bytes / seconds / rates.bandwidth,
            "of_matrix_rate": num_operations / seconds / rates.matrix,
        }

    for name, form in forms.items():
        line: Line = {"kind": "attention", "form": name, "queries": num_queries, "keys": length}
        yield attempt(line | {"sequences": num_sequences}, partial(time_form, form))


def time_linear(num_rows: int, width: int, depth: int) -> Iterator[Line]:
    """The deterministic base product compared with the library's, over weights that do not fit the cache."""
    layers = max(1, _COLD_BYTES // (2 * width * depth))
    x = torch.randn(num_rows, depth, device=DEVICE).to(BF16)
    weight = torch.randn(layers, width, depth, device=DEVICE).to(BF16)
    out = torch.empty(num_rows, width, device=DEVICE, dtype=BF16)

    def batch_invariant() -> None:
        for i in range(layers):
            matmul.linear(x, weight[i], out)

    def time_form(form: Callable[[], object]) -> Line:
        return {"seconds": graph_seconds(form) / layers}

    forms: dict[str, Callable[[], object]] = {
        "deterministic": batch_invariant,
        "torch": lambda: [torch.mm(x, weight[i].T, out=out) for i in range(layers)],
    }
    for name, form in forms.items():
        line: Line = {"kind": "linear", "form": name, "rows": num_rows, "width": width, "depth": depth}
        yield attempt(line, partial(time_form, form))


def cells(rates: Ceilings) -> Iterator[tuple[str, Callable[[], Iterator[Line]]]]:
    """(name, what times it), in order of interest."""
    grid = list(lora_cells())
    all_forms = tuple(lora_forms.FORMS)
    first = 13  # rank 16, 4096 to 14336, all batches
    for sizes in grid[:first]:
        yield sizes.name, partial(time_lora, sizes, rates, all_forms)
    for num_adapters in (1, 4, 64):
        sizes = Sizes(4096, 14336, (16,), 64, num_adapters)
        yield f"PEFT, {sizes.name}", partial(time_peft, sizes)
    for case in ((64, 1, 1024), (64, 1, 8192), (1, 1, 8192), (16, 1, 8192), (4, 2048, 2048)):
        yield f"attention, {case[0]} x {case[1]} on {case[2]}", partial(time_attention, *case, rates)
    for depth, width in SHAPES[:2]:
        sizes = Sizes(depth, width, (16,), 2048, 8)
        yield f"prefill, {sizes.name}", partial(time_lora, sizes, rates, OURS[1:])
    for case in ((1, 28672, 4096), (64, 28672, 4096), (2048, 28672, 4096)):
        yield f"base product, {case[0]} rows, {case[2]} to {case[1]}", partial(time_linear, *case)
    large = [sizes for sizes in grid[first:] if sizes.num_bytes(2) > LARGE_BYTES]
    for sizes in large + [sizes for sizes in grid[first:] if sizes not in large]:
        yield sizes.name, partial(time_lora, sizes, rates, all_forms)


def measure(clock: Clock, lines: list[Line]) -> None:
    """Time everything there is time for; the last line says what was left out."""
    rates = ceilings()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    lines.append({"kind": "machine", "device": torch.cuda.get_device_name(), **versions, **rates._asdict()})
    longest_s, skipped = 0.0, list[str]()
    for name, cell in cells(rates):
        if skipped or clock.left_s < 10 + longest_s:
            skipped.append(name)
            continue
        started = time.monotonic()
        lines += ({"cell": name, **line} for line in cell())
        longest_s = max(longest_s, time.monotonic() - started)
        torch.cuda.empty_cache()
    lines.append({"kind": "skipped", "cells": skipped})


def table(lines: list[Line]) -> str:
    """The short form: rank 16 at 4096 to 14336, the bound on large decodes, attention, the price of determinism."""
    machine = next(line for line in lines if line["kind"] == "machine")
    rates = f"copy {machine['bandwidth'] / 1e12:.2f} TB/s, bf16 product {machine['matrix'] / 1e12:.0f} TFLOP/s"
    names = [*lora_forms.FORMS, "PEFT"]
    text = [f"{machine['device']}: {rates}", "", "us per product, rank 16, 4096 to 14336; bound: best of ours"]
    text.append(f"{'rows/adapters':>14} " + " ".join(f"{name:>13}" for name in names) + "  of bound")
    time_form = [line for line in lines if line["kind"] == "lora" and "seconds" in line]
    chosen = [line for line in time_form if (line["depth"], line["width"], line["ranks"]) == (4096, 14336, (16,))]
    for key in dict.fromkeys((line["num_rows"], line["num_adapters"]) for line in chosen):
        row = {line["form"]: line for line in chosen if (line["num_rows"], line["num_adapters"]) == key}
        times = " ".join(f"{row[name]['seconds'] * 1e6:13.1f}" if name in row else " " * 13 for name in names)
        bounds = [max(row[n]["of_bandwidth"], row[n]["of_matrix_rate"]) for n in OURS[:2] if n in row]
        text.append(f"{key[0]:>8}/{key[1]:<5} {times}  {max(bounds, default=0.0):.2f}")
    best: dict[str, float] = {}
    for line in time_form:
        if line["form"] in OURS[:2] and line["bytes"] > LARGE_BYTES and line["num_rows"] <= lora_forms.MAX_DECODE_ROWS:
            best[line["cell"]] = max(best.get(line["cell"], 0.0), line["of_bandwidth"])
    reached, lowest = sum(value >= 0.7 for value in best.values()), min(best.values(), default=0.0)
    text.append(f"decodes of > 64 MB at >= 0.7 of the bandwidth: {reached} of {len(best)}, lowest {lowest:.2f}")
    for line in lines:
        if line["kind"] in ("attention", "linear") and "seconds" in line:
            bounds = [line[name] for name in ("of_bandwidth", "of_matrix_rate") if name in line]
            rest = f", {max(bounds):.2f} of bound" if bounds else ""
            text.append(f"{line['cell']}, {line['form']}: {line['seconds'] * 1e6:.1f} us{rest}")
    skipped = lines[-1]["cells"]
    if skipped:
        text.append(f"left out for lack of time: {len(skipped)} cells, from {skipped[0]!r} on")
    return "\n".join(text)


def run(budget_s: float) -> tuple[list[Line], str]:
    """(all lines, the text to end with)."""
    clock = Clock(budget_s)
    lines = list(checks(DEVICE))
    if HAS_GPU:
        measure(clock, lines)
    checked = [line for line in lines if "passed" in line]
    failed = [line for line in checked if not line["passed"]]
    summary = f"{len(checked) - len(failed)} of {len(checked)} checks passed"
    summary += "".join(f"\nFAILED {json.dumps(line)}" for line in failed)
    if HAS_GPU:
        return lines, f"{table(lines)}\n{summary}"
    return lines, f"{summary}\nNo GPU: kernels ran in Triton's interpreter on tiny operands; nothing was timed."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget-s", type=float, default=480, help="seconds after which nothing new is begun")
    parser.add_argument("--json", type=Path, help="where to write the JSON lines; printed before the table by default")
    parser.add_argument("--tune", action="store_true", help="search configurations instead of comparing forms")
    parser.add_argument("--tuned", type=Path, help="where --tune writes; by default the file the kernels read")
    arguments = parser.parse_args()
    if arguments.tune:
        if not HAS_GPU:
            parser.error("--tune times kernels, and there is no GPU here; run it on a machine that has one")
        tune(lora_cells(), Clock(arguments.budget_s), arguments.tuned or main_path(), DEVICE)
        return
    lines, text = run(arguments.budget_s)
    written = "".join(json.dumps(line) + "\n" for line in lines)
    if arguments.json is None:
        print(written, end="")
    else:
        arguments.json.write_text(written)
    print(text)
    if not all(line.get("passed", True) for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
