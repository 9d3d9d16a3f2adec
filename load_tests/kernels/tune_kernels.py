"""Searches the configurations of the LoRA kernels on this GPU: one field at a time, the fastest that is still right.

Writes a file that `app.kernels.tuning` reads, after every shape. A change has to win by two per cent, so that noise
decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from app.kernels import tuning
from app.kernels.bgmv import triton as bgmv
from app.kernels.sgmv import triton as sgmv
from load_tests.kernels import lora_forms
from load_tests.kernels.gpu_timing import Clock, graph_seconds
from load_tests.kernels.lora_forms import TOLERANCE, Sizes, Workload

#: What is tried for every field a kernel's configuration has.
CHOICES = {
    "block_rank": (8, 16, 32, 64),
    "block_k": (64, 128, 256, 512),
    "num_splits": (1, 2, 4, 8, 16),
    "num_parts": (1, 2),
    "block_columns": (64, 128, 256, 512),
    "shrink_warps": (2, 4, 8),
    "expand_warps": (2, 4, 8),
    "num_stages": (2, 3, 4),
}


def tune(
    grid: Iterable[Sizes], clock: Clock, path: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Every shape of the grid with a different adapter per row, in its order, until the budget is spent."""
    found: dict[str, dict[str, int]] = {}
    for sizes, kernel in product(grid, ("bgmv", "sgmv")):
        if clock.left_s < 40:
            break
        # A configuration's key does not contain the number of adapters: measure the case with the most bytes.
        if sizes.num_adapters != sizes.num_rows or (kernel == "bgmv" and sizes.num_rows > lora_forms.MAX_DECODE_ROWS):
            continue
        workload = Workload(sizes, lora_forms.cold_layers(sizes), dtype, device)
        key, best = configuration(workload, kernel)
        if key in found:
            continue
        best, best_s = _search(workload, kernel, best, clock)
        if best_s == float("inf"):
            print(f"{key}: no configuration gives right results", flush=True)
            continue
        found[key] = best._asdict()
        measured = {"device": _name(device), "measured": True, "configurations": found}
        path.write_text(json.dumps(measured, indent=1) + "\n")
        print(f"{key}: {best_s / workload.num_layers * 1e6:.1f} us, {best}", flush=True)


def configuration(workload: Workload, kernel: str) -> tuple[str, Any]:
    """(key in the file of measured configurations, the configuration used without one) of "bgmv" or "sgmv"."""
    sizes, rows = workload.sizes, workload.rows[0]
    max_rank = max(sizes.ranks)
    if kernel == "bgmv":
        return bgmv.key(sizes.num_rows, rows, max_rank), bgmv.configuration(sizes.num_rows, rows, max_rank)
    cut = sgmv.block_tokens(sizes.num_rows)
    num_segments = lora_forms.num_segments(sizes, cut)
    return sgmv.key(num_segments, cut, rows, max_rank), sgmv.configuration(num_segments, cut, rows, max_rank)


def _search(workload: Workload, kernel: str, best: Any, clock: Clock) -> tuple[Any, float]:
    best_s = _seconds(workload, kernel, best)
    for field in best._fields:
        start = getattr(best, field)
        for value in CHOICES[field]:
            tried = best._replace(**{field: value})
            # Tensor cores want 16 rank rows at least.
            if value == start or (kernel == "sgmv" and tried.block_rank < 16) or clock.left_s < 20:
                continue
            try:
                taken_s = _seconds(workload, kernel, tried)
            except OutOfResources:  # a tile too large for this device
                continue
            if taken_s < 0.98 * best_s:
                best, best_s = tried, taken_s
    return best, best_s


def _seconds(workload: Workload, kernel: str, config: Any) -> float:
    """Seconds of all layers; infinite for a configuration that gives wrong results."""
    form = lora_forms.FORMS[kernel](workload, config)
    if not lora_forms.check(workload, form) < TOLERANCE[workload.x.dtype]:
        return float("inf")
    return graph_seconds(partial(lora_forms.all_layers, form, workload, workload.num_layers), 7)


def main_path() -> Path:
    """The file that the kernels read on this device."""
    return tuning.FOLDER / tuning.file_name(torch.cuda.get_device_name())


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
