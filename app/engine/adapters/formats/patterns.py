r"""Regular expressions of adapters' configurations: Python's `re`, which PEFT uses, with a bound on their time.

A pattern of thirty characters can keep `re` busy for years, and configurations are untrusted. A timer of processor
time ends a match: `re` looks for signals while it matches. Signals reach the main thread only, as in the reader
process; in another thread the patterns run in a process of their own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError, AdapterReadFailed

_MAX_CHARS = 4096
#: Processor time for all patterns of a setting.
MAX_SECONDS = 1.0
#: For the process that runs the patterns of another thread: its start, on a loaded machine.
_CHILD_SECONDS = 60.0
_PROJECT = Path(__file__).parents[4]
#: Stands for the pattern in a template.
PATTERN = "{pattern}"
#: PEFT's `get_pattern_key`: the whole name, or its end after a dot.
NAME_END = rf"(.*\.)?({PATTERN})$"

#: The pattern that matched, as an index, and its group `idx`, if any.
Match = tuple[int, str | None]


class _PatternTooSlow(Exception):
    pass


def first_matches(
    patterns: Sequence[str], names: Sequence[str], key: str, *, template: str = PATTERN, is_whole: bool = False
) -> list[Match | None]:
    """Per name, the first of the patterns that matches it from its start, or the whole of it; None without one.

    template: the regular expression around each pattern. key names the setting in errors. Raises AdapterFormatError
    for a pattern that `re` does not understand or that takes longer than `MAX_SECONDS`.
    """
    for pattern in patterns:
        if len(pattern) > _MAX_CHARS:
            raise AdapterFormatError(
                f"{key}: a pattern of {len(pattern)} characters; at most {_MAX_CHARS}, or list the modules"
            )
    if not patterns:
        return [None] * len(names)
    if threading.current_thread() is threading.main_thread():
        return _bounded_matches(patterns, names, key, template, is_whole=is_whole)
    return _matches_in_child(patterns, names, key, template, is_whole=is_whole)


def full_matches(pattern: str, names: Sequence[str], key: str) -> list[bool]:
    """Per name, whether the whole of it matches (`re.fullmatch`). Errors: see `first_matches`."""
    return [found is not None for found in first_matches([pattern], names, key, is_whole=True)]


def _bounded_matches(
    patterns: Sequence[str], names: Sequence[str], key: str, template: str, *, is_whole: bool
) -> list[Match | None]:
    found: list[Match | None] = [None] * len(names)
    pattern = ""

    def stop(*_: object) -> None:
        raise _PatternTooSlow

    before = signal.signal(signal.SIGPROF, stop)
    try:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        try:
            for index, pattern in enumerate(patterns):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # of syntax that may get another meaning
                    compiled = re.compile(template.replace(PATTERN, pattern))
                match = compiled.fullmatch if is_whole else compiled.match
                for place, name in enumerate(names):
                    if found[place] is None and (one := match(name)) is not None:
                        found[place] = index, one.groupdict().get("idx")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _PatternTooSlow:
        raise AdapterFormatError(
            f"{key}: pattern {short(pattern)} takes longer than {MAX_SECONDS:g} s of processor time; list the module "
            "names instead"
        ) from None
    except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise AdapterFormatError(
            f"{key}: pattern {short(pattern)} is not understood ({str(error)[:200] or type(error).__name__}); list the "
            "module names instead"
        ) from error
    finally:
        signal.signal(signal.SIGPROF, before)
    return found


def _matches_in_child(
    patterns: Sequence[str], names: Sequence[str], key: str, template: str, *, is_whole: bool
) -> list[Match | None]:
    question = json.dumps([patterns, names, key, template, is_whole])
    command = [sys.executable, "-m", "app.engine.adapters.formats.patterns"]
    try:
        done = subprocess.run(
            command,
            input=question.encode(),
            capture_output=True,
            cwd=_PROJECT,
            timeout=_CHILD_SECONDS,
            check=True,
            env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(_PROJECT)},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise AdapterReadFailed(f"{key}: the process that matches its patterns failed: {str(error)[:200]}") from error
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise AdapterFormatError(answer["error"])
    return [None if one is None else (one[0], one[1]) for one in answer["found"]]


def _answer(question: bytes) -> dict[str, object]:
    patterns, names, key, template, is_whole = json.loads(question)
    try:
        return {"found": _bounded_matches(patterns, names, key, template, is_whole=is_whole)}
    except AdapterFormatError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps(_answer(sys.stdin.buffer.read())))
