"""The table of options in docs/reference/adapter-formats.md says what the tests show.

Rewrite it with `python -m tests.engine.adapters.test_docs`.
"""

from __future__ import annotations

from pathlib import Path

from app.engine.adapters.features import XLA_FEATURES
from app.engine.adapters.formats.peft_config import CLASSIFIES, INERT_KEYS, OFF_VALUES
from tests.engine.adapters.formats.test_peft_parity import BEYOND, FUSED, HALVES, OPTIONS
from tests.engine.adapters.moe_parity import FORMATS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "adapter-formats.md"
START = "<!-- options: written by tests/engine/adapters/test_docs.py -->\n"
END = "<!-- end of options -->\n"


def options_table() -> str:
    lines = ["| option | |", "|---|---|"]
    lines += [f"| {option} | served |" for option in (*OPTIONS, *FUSED, *HALVES)]
    lines += [f"| {option} | served{_by_whom(option)} |" for option in BEYOND]
    lines += ["| `alora_invocation_tokens` (activated LoRA) | served, on linear modules but experts |"]
    lines += [f"| `task_type: {CLASSIFIES}` with its head | served by `engine.cpu`, on decoders and RoBERTa encoders |"]
    lines += [
        f"| mixtures of experts: {option} | served by `engine.cpu`, `engine.cuda` and `engine.xla` |"
        for option in FORMATS
    ]
    lines += [f"| `{key}` | rejected unless {_values(key)}: {OFF_VALUES[key][1]} |" for key in sorted(OFF_VALUES)]
    lines += [f"| {', '.join(f'`{key}`' for key in sorted(INERT_KEYS))} | ignored: no effect once trained |"]
    lines += ["| any other key | rejected unless it is `null` |"]
    return "\n".join(lines) + "\n"


def _by_whom(option: str) -> str:
    refused = BEYOND[option][1] - XLA_FEATURES
    return f"; `engine.xla` rejects {' and '.join(sorted(refused))}" if refused else ""


def _values(key: str) -> str:
    allowed, _ = OFF_VALUES[key]
    return " or ".join(f"`{value}`" for value in allowed)


def with_table(page: str) -> str:
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return before + START + options_table() + END + after


def test_the_page_shows_the_tested_options() -> None:
    page = PAGE.read_text()
    assert START in page
    assert END in page
    assert with_table(page) == page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
