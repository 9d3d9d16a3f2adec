"""What steps, prompts and loads take: the table that the simulation counts time with.

In: a JSON file with one number per field, as `python -m load_tests.simulate measure` writes it on a machine. Out:
`CostsResponse`. Rule: times come from the real engine; a simulation says whose. A step of B decoding sequences whose adapters
have R rank rows together takes `step_s + B * sequence_s + R * row_s`; P tokens of a prompt, each of which looks at
itself and all before it, at L in all, take `P * prompt_token_s + L * look_s` beside that; and writing an adapter of r
rank rows takes `r * row_write_s`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from app.engine.errors import ConfigError

#: A line through the steps of docs/reference/performance.md (its tables of decoding, prompts and an adapter's way up).
DEFAULT_COSTS = Path(__file__).with_name("costs.json")


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, and the size of adapters. `row_bytes`: bytes of an adapter per rank row, on the host.

    `host_s`: from the host's memory to the engine; `disk_s`: from disk to there; `source_s`: from the source to disk.
    `start_s`: from the decision for one more replica to its first request. `machine`, `source`: where it was measured,
    and how.
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
    machine: str = "not said"
    source: str = "not said"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("machine", "source") and (type(value) not in (int, float) or not 0 <= value < 1e12):
                raise ConfigError(f"costs: {field.name} is {value!r} but must be a number, 0 or more")
        if self.step_s + self.sequence_s == 0:
            raise ConfigError("costs: a step takes no time; give step_s or sequence_s")

    def decode_s(self, num_sequences: int, num_rows: int) -> float:
        """One step of so many decoding sequences, with the rank rows of their adapters."""
        return self.step_s + num_sequences * self.sequence_s + num_rows * self.row_s

    def prompt_s(self, num_before: int, num_tokens: int) -> float:
        """So many tokens of a prompt that come after so many."""
        return num_tokens * (self.prompt_token_s + (num_before + (num_tokens + 1) / 2) * self.look_s)


def read_costs(path: Path = DEFAULT_COSTS) -> Costs:
    """Raises ConfigError for a file that is no such table."""
    try:
        return Costs(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no table of costs: {error}") from error


def write_costs(costs: Costs, path: Path) -> None:
    path.write_text(json.dumps(asdict(costs), indent=2) + "\n")
