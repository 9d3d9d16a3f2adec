"""Which columns of a linear module each tensor-parallel shard holds.

A module is split on its output by heads or feed-forward columns, each target by itself, or on its input likewise, and
then the shards' sums are added. With fewer KV heads than shards, several shards hold the same KV head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import ConfigError
from app.engine.models.linear_modules import LinearModule


def check_shards(
    modules: Iterable[LinearModule], num_shards: int, model: str, setting: str = "engine.xla.tensor_parallel"
) -> None:
    """ConfigError, naming `model` and `setting`, unless every module divides by `num_shards`."""
    for module in modules:
        for target, groups in zip(module.targets, module.groups, strict=True):
            repeats = module.kind.split == "output" and num_shards % groups == 0
            if groups % num_shards and not repeats:
                raise ConfigError(
                    f"{setting} {num_shards} does not divide {model}: {target} falls into {groups} "
                    "parts; choose a divisor"
                )


def shard_columns(module: LinearModule, num_shards: int) -> dict[str, NDArray[np.int64]]:
    """Target -> [num_shards, columns]: the outputs that a shard computes, or the inputs that it reads."""
    found = {}
    for target, width, groups in zip(module.targets, module.widths, module.groups, strict=True):
        size = (width if module.kind.split == "output" else module.d_in) // groups
        first = np.arange(num_shards) * groups // num_shards
        mine = first[:, None] + np.arange(max(1, groups // num_shards))  # [shards, groups of one]
        found[target] = (mine[:, :, None] * size + np.arange(size)).reshape(num_shards, -1)
    return found


def shard_module(module: LinearModule, num_shards: int) -> LinearModule:
    """The linear module that one shard computes."""
    columns = [mine.shape[1] for mine in shard_columns(module, num_shards).values()]
    groups = tuple(max(1, count // num_shards) for count in module.groups)
    if module.kind.split == "input":
        return replace(module, d_in=columns[0], groups=groups)
    return replace(module, widths=tuple(columns), groups=groups)


def whole_output(
    by_shard: NDArray[np.float32], module: LinearModule, target: str, num_shards: int
) -> NDArray[np.float32]:
    """One target's [d_out], assembled from the shards' columns [num_shards * width] of a module split on its output."""
    mine = shard_columns(module, num_shards)[target]
    columns = shard_module(module, num_shards).columns(target)
    found = np.empty(module.widths[module.targets.index(target)], np.float32)
    found[mine] = by_shard.reshape(num_shards, -1)[:, columns]
    return found
