"""The cost table: how long steps, prompts and loads take in the simulation.

A JSON file with one number per field, written by `python -m load_tests.simulate measure` from the real engine. A step
of B decoding sequences whose adapters have R rank rows together takes `step_s + B * sequence_s + R * row_s`. P prompt
tokens with L attended positions in all add `P * prompt_token_s + L * look_s`. Loading an adapter of r rank rows takes
`r * row_write_s`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from app.engine.errors import ConfigError

#: Fitted to the steps in docs/reference/performance.md.
DEFAULT_COSTS = Path(__file__).with_name("costs.json")


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, and the size of adapters. `row_bytes`: host bytes of an adapter per rank row.

    `host_s`: from host memory to the engine; `disk_s`: from disk to host memory; `source_s`: from the source to disk.
    `start_s`: from the decision for a new replica to its first request. `machine`, `source`: where and how it was
    measured.
    """

    step_s: float
    sequence_s: float
    row_s: float
    prompt_token_s: float
    row_write_s: float
    row_bytes: float
    host_s: float
    disk_s: float
    source_s: float
    start_s: float
    look_s: float = 0.0
    machine: str = "unknown machine"
    source: str = "unknown source"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("machine", "source") and (type(value) not in (int, float) or not 0 <= value < 1e12):
                raise ConfigError(f"costs: {field.name} is {value!r} but must be a number, 0 or more")
        if self.step_s + self.sequence_s == 0:
            raise ConfigError("costs: a step takes no time; give step_s or sequence_s")

    def decode_s(self, num_sequences: int, num_rows: int) -> float:
        """One step of decoding sequences with `num_rows` rank rows of their adapters."""
        return self.step_s + num_sequences * self.sequence_s + num_rows * self.row_s

    def prompt_s(self, num_before: int, num_tokens: int) -> float:
        """`num_tokens` tokens of a prompt after `num_before` others."""
        return num_tokens * (self.prompt_token_s + (num_before + (num_tokens + 1) / 2) * self.look_s)


def read_costs(path: Path = DEFAULT_COSTS) -> Costs:
    """The cost table in a file. Raises ConfigError for an invalid one."""
    try:
        return Costs(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a cost table: {error}") from error


def write_costs(costs: Costs, path: Path) -> None:
    path.write_text(json.dumps(asdict(costs), indent=2) + "\n")
