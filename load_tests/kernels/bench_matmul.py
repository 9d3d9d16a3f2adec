"""Cost of bit-identity in the base products: our packed matmul compared with torch's linear, in one run.

`torch.linear` is the usual choice without the promise: its bits change with the number of rows. The table also has it
with rows padded to a multiple of four, which keeps the promise on some processors. The times of the four products of
one layer are added up; weights of several layers take turns, so that they come from memory, as in a model. In the same
run the promise is checked for every product and row count: the rows computed together equal the rows computed one by
one, bit for bit, or the program ends with an error. torch's rows are counted by the same comparison.

    python -m load_tests.kernels.bench_matmul --rows 1,4,8,32,128
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.models.linear_modules import target_shape
from app.engine.models.spec import ModelSpec
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.cpu import matmul, pack
from load_tests.stats import environment, numbers, ratios, rounds, spread

Floats = NDArray[np.float32]

OURS, LINEAR, PADDED = "packed", "torch linear", "torch linear, rows padded to 4"


class Product(NamedTuple):
    """One product of a layer: x [M, K] times w [N, K] transposed; `packed` is w in panels."""

    w: torch.Tensor
    packed: Floats


def products(spec: ModelSpec, num_layers: int, rng: np.random.Generator) -> list[Product]:
    """qkv, o, gate and up, down of `num_layers` layers, with random weights."""
    layer_products = []
    for _ in range(num_layers):
        shapes = [target_shape(spec, 0, target) for target in ("q_proj", "k_proj", "v_proj")]
        gate, out, down = (target_shape(spec, 0, target) for target in ("gate_proj", "o_proj", "down_proj"))
        for depth, width in (
            (spec.hidden_size, sum(d_out for _, d_out in shapes)),
            out,
            (gate[0], 2 * gate[1]),
            down,
        ):
            w = rng.standard_normal((width, depth), np.float32) * depth**-0.5
            layer_products.append(Product(torch.from_numpy(w), pack(w)))
    return layer_products


def ours(product: Product, x: Floats, team: ThreadTeam) -> Floats:
    """[M, K] -> [M, N padded to panels]."""
    out = np.empty((x.shape[0], product.packed.shape[0] * 16), np.float32)
    team.run(matmul, 1, x, product.packed, out, False)
    return out


def linear(product: Product, x: Floats) -> Floats:
    """torch's own."""
    found: Floats = torch.nn.functional.linear(torch.from_numpy(x), product.w).numpy()
    return found


def linear_padded(product: Product, x: Floats) -> Floats:
    """torch's own over a multiple of four rows."""
    padded = np.zeros((-(-x.shape[0] // 4) * 4, x.shape[1]), np.float32)
    padded[: x.shape[0]] = x
    return linear(product, padded)[: x.shape[0]]


def changed_rows(compute: Callable[[Product, Floats], Floats], product: Product, x: Floats) -> int:
    """How many rows come out differently alone."""
    together = compute(product, x)
    alone = np.concatenate([compute(product, x[i : i + 1]) for i in range(x.shape[0])])
    return int((together.view(np.int32) != alone.view(np.int32)).any(axis=1).sum())


def run(spec: ModelSpec, row_counts: tuple[int, ...], num_layers: int, num_rounds: int, num_threads: int) -> str:
    """The Markdown table. Raises RuntimeError if a row of ours depends on its batch."""
    rng = np.random.default_rng(0)
    layer_products = products(spec, num_layers, rng)
    systems: dict[str, Callable[[Product, Floats], Floats]] = {
        OURS: partial(ours, team=ThreadTeam(num_threads)),
        LINEAR: linear,
        PADDED: linear_padded,
    }
    inputs = {
        (m, product.w.shape[1]): rng.standard_normal((m, product.w.shape[1]), np.float32)
        for m in row_counts
        for product in layer_products[:4]
    }

    def layer_s(system: str, m: int) -> float:
        started = time.perf_counter()
        for product in layer_products:
            systems[system](product, inputs[m, product.w.shape[1]])
        return (time.perf_counter() - started) / num_layers

    lines = [
        f"| rows | {OURS}, ms per layer | {LINEAR} | {PADDED} | {OURS} / {LINEAR} | {OURS} / {PADDED} | "
        f"rows that depend on the batch: {OURS}, {LINEAR}, {PADDED} |",
        "|---:|---:|---:|---:|---|---|---|",
    ]
    with torch.inference_mode():
        for m in row_counts:
            changed = {
                name: sum(changed_rows(compute, p, inputs[m, p.w.shape[1]]) for p in layer_products[:4])
                for name, compute in systems.items()
            }
            if changed[OURS]:
                raise RuntimeError(f"{changed[OURS]} rows of {m} depend on their batch: bit-identity is broken")
            values = rounds({name: partial(layer_s, name, m) for name in systems}, num_rounds)
            times = [f"{1000 * spread(values[name]).median:.3f}" for name in systems]
            against = [str(ratios(values[OURS], values[name])) for name in (LINEAR, PADDED)]
            counted = ", ".join(f"{changed[name]} of {4 * m}" for name in systems)
            lines.append(f"| {m} | " + " | ".join([*times, *against, counted]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Our packed matmul compared with torch's linear, with the bits checked."
    )
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI; only its shapes are used")
    parser.add_argument("--rows", type=numbers, default=(1, 2, 4, 8, 16, 32, 64, 128, 256))
    parser.add_argument("--layers", type=int, default=8, help="weights that take turns")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="0 takes every core")
    parser.add_argument("--json", action="store_true", help="print the machine as JSON too")
    arguments = parser.parse_args()
    machine = environment()
    threads = arguments.threads or int(str(machine["num_cpus"]))
    spec = load_checkpoint(resolve_model(arguments.model)).spec
    torch.set_num_threads(threads)
    table = run(spec, arguments.rows, arguments.layers, arguments.rounds, threads)
    if arguments.json:
        print(json.dumps(machine))
    print(
        f"{machine['cpu']}, {threads} threads, commit {machine['commit']}, load average before "
        f"{machine['load_average']}, after {environment()['load_average']}; shapes of {spec.name}, "
        f"{arguments.rounds} interleaved rounds.\n\n{table}"
    )


if __name__ == "__main__":
    main()
