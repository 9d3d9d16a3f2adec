"""Tile shapes of the GPU kernels: measured per device and shape where available, else rules of thumb.

Measured values are files `tuned/<device>.json`, written by `load_tests/kernels/bench_kernels.py --tune`; for a device
or shape without an entry each kernel has its own rule of thumb. A configuration changes the speed and the order of
sums, never the result beyond rounding; batch-invariant mode does not read these files, so that its bits survive a
tuning run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "tuned"
#: Programs that keep every multiprocessor of a large GPU busy (H200: 132, four each).
ENOUGH_PROGRAMS = 528


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least value, 1 for values below."""
    return 1 << max(0, value - 1).bit_length()


def ceil_div(value: int, by: int) -> int:
    """value / by, rounded up."""
    return -(-value // by)


def shape_key(operation: str, *sizes: int, dtype: torch.dtype) -> str:
    """The key of a measured configuration: "sgmv/64/16/4096/6144/3/16/bfloat16"."""
    return "/".join([operation, *map(str, sizes), str(dtype).removeprefix("torch.")])


def tuned_config(device: torch.device, key: str) -> Mapping[str, int] | None:
    """The configuration measured on this device for this shape, or None."""
    if device.type != "cuda":
        return None
    return _of_device(device).get(key)


def file_name(device_name: str) -> str:
    """A device's file name: "nvidia_h200.json" for an "NVIDIA H200"."""
    return device_name.lower().replace(" ", "_").replace("/", "_") + ".json"


@functools.cache
def _of_device(device: torch.device) -> Mapping[str, Mapping[str, int]]:
    """A device's configurations, cached: every launch needs them."""
    path = FOLDER / file_name(torch.cuda.get_device_name(device))
    if not path.is_file():
        return {}
    configurations: Mapping[str, Mapping[str, int]] = json.loads(path.read_text())["configurations"]
    return configurations
