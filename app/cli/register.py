"""`polylora register`: register adapters with a running service without loading them.

Reads JSON lines with `name` and `path`, optionally `traffic_weight` and `description`, from a file or stdin. They are
sent in batches, each registered as a whole or not at all; sending a file again changes nothing. An adapter is loaded at
its first request.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from app.cli.api_client import ApiClient, ApiError, add_url_option
from app.engine.errors import ConfigError

#: Adapters per call: well below the service's maximum and below 4 MiB of body.
BATCH = 5_000
#: The beginning of an error about one adapter of the batch.
_OF_ONE = re.compile(r"adapters\.(\d+)[.:] ?")


def add_register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("register", help="register adapters with a running service without loading them")
    parser.add_argument("file", type=Path, help='JSON lines like {"name": "sql", "path": "sql"}; - for stdin')
    add_url_option(parser)
    parser.set_defaults(run=_register)


def _register(arguments: argparse.Namespace) -> int:
    service = ApiClient(arguments.url)
    num_new = num_same = 0
    with sys.stdin if str(arguments.file) == "-" else _open(arguments.file) as lines:
        adapters = adapters_of(lines, str(arguments.file))
        while some := list(islice(adapters, BATCH)):
            try:
                done = service.call("POST", "/v1/loras/manifest", {"adapters": [adapter for _, adapter in some]})
            except ApiError as error:
                raise ConfigError(_by_line(str(error), [number for number, _ in some], str(arguments.file))) from error
            num_new += int(done["num_registered"])
            num_same += int(done["num_unchanged"])
    print(f"{num_new} adapters registered, {num_same} as they were")
    return 0


def adapters_of(lines: Iterable[str], file: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, adapter) of each line that is not empty. Raises ConfigError with the line's number; the service
    checks the fields.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f'{file}, line {number} is not an object like {{"name": "sql", "path": "sql"}}')
        yield number, found


def _by_line(refusal: str, numbers: Sequence[int], file: str) -> str:
    """The service's error about the adapter at an index, with its line instead."""
    found = _OF_ONE.match(refusal)
    if found is None:
        return refusal
    return f"{file}, line {numbers[int(found[1])]}: {refusal[found.end() :]}"


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
