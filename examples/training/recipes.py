"""Training recipes of the demo adapters: task, LoRA shape and schedule.

They differ in rank, target modules and scaling rule on purpose, so that a server which mixes up rank, scale or targets
fails on them. Every adapter stays below 3 MB in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

from examples.training import extract, sql, support, tools
from examples.training.task import Task

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Recipe:
    """One adapter. `alpha` becomes the scale alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""

    task: Task
    rank: int
    alpha: int
    targets: tuple[str, ...]
    use_rslora: bool
    num_steps: int
    batch_size: int = 8
    learning_rate: float = 2e-3
    seed: int = 0


RECIPES = {
    "sql": Recipe(sql.TASK, 4, 16, (*ATTENTION, "gate_proj", "up_proj", "down_proj"), False, num_steps=100),
    "extract": Recipe(extract.TASK, 16, 8, ("q_proj", "v_proj", "o_proj"), True, num_steps=100),
    "support": Recipe(support.TASK, 8, 16, ATTENTION, False, num_steps=80),
    "tools": Recipe(
        tools.TASK, 6, 12, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), False, num_steps=50, batch_size=10
    ),
}
