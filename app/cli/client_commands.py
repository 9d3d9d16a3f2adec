"""Short commands for a running service: `ls`, `load`, `unload`, `alias`, `drain`, `chat` and `logs`.

Each prints text, or with --json the service's answers. A name may have a slash, and where a request may name a version,
a version (docs/reference/names.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from app.cli.api_client import INFERENCE_ROUTE, ApiClient, add_url_option
from app.cli.status import event_line, table
from app.engine.errors import ConfigError

#: How often `logs --follow` asks for new events.
POLL_INTERVAL_S = 1.0
_MAX_EVENTS = 1000


class Answer(NamedTuple):
    """What a command got from the service, and the same for people."""

    body: Any
    lines: Sequence[str]


def add_client_commands(commands: Any) -> None:
    _add(commands, "ls", "list a service's adapters and aliases", _ls)

    load = _add(commands, "load", "load an adapter into a service; returns when it is served", _load)
    load.add_argument("name", help="its name for requests, such as sql or org/name")
    load.add_argument(
        "path", nargs="?", help="a folder that the service reads, or a URI; default: read a lazy name now"
    )
    load.add_argument("--pin", action="store_true", help="keep it loaded everywhere")
    load.add_argument("--lazy", action="store_true", help="register the name; its first request loads the adapter")
    load.add_argument("--description", help="what it is for")

    unload = _add(commands, "unload", "unload an adapter; returns when its running requests have ended", _unload)
    unload.add_argument("name")

    alias = _add(commands, "alias", "show aliases, or change one: its adapters and their weights", _alias)
    alias.add_argument("name", nargs="?", help="default: show all aliases")
    alias.add_argument("targets", nargs="*", metavar="ADAPTER[=WEIGHT]", help="send its requests there from now on")
    change = alias.add_mutually_exclusive_group()
    change.add_argument("--promote", metavar="ADAPTER", help="send all requests to this one of its adapters")
    change.add_argument("--rollback", nargs="?", type=int, const=0, metavar="VERSION", help="default: the last change")
    change.add_argument("--remove", action="store_true")

    drain = _add(commands, "drain", "have an engine replica end its requests and be replaced", _drain)
    drain.add_argument("replica_id", metavar="REPLICA", help="its id; polylora status lists them")
    drain.add_argument("--force", action="store_true", help="also the only one: requests wait for its successor")

    chat = _add(commands, "chat", "ask a model; without a prompt read questions from the terminal until its end", _chat)
    chat.add_argument("model", help="the base, an adapter or an alias")
    chat.add_argument("prompt", nargs="?")
    chat.add_argument("--system", help="a system prompt")
    chat.add_argument("--max-tokens", type=int)
    chat.add_argument("--temperature", type=float)

    logs = _add(commands, "logs", "print what happened to adapters, oldest first", _logs)
    logs.add_argument("name", nargs="?", help="of this adapter only")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with new events until ctrl-C")
    logs.add_argument("-n", "--lines", type=int, default=50, help="how many earlier events; default: 50")


def _add(
    commands: Any, name: str, text: str, run: Callable[[ApiClient, argparse.Namespace], Iterable[Answer]]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text)
    add_url_option(parser)
    parser.add_argument("--json", action="store_true", help="print the service's answers as JSON")

    def print_answers(arguments: argparse.Namespace) -> int:
        for answer in run(ApiClient(arguments.url), arguments):
            lines = [json.dumps(answer.body)] if arguments.json else answer.lines
            if lines:
                print("\n".join(lines), flush=True)
        return 0

    parser.set_defaults(run=print_answers)
    return parser


def _ls(service: ApiClient, _: argparse.Namespace) -> Iterator[Answer]:
    adapters, aliases = list(service.list_all("/v1/loras")), list(service.list_all("/v1/aliases"))
    rows = [
        (each["id"], each["state"], f"{each['generation']}", f"{each['max_rank']}", _mib(each["size_bytes"]),
         "pinned" if each["pinned"] else "", each["source"])
        for each in adapters
    ]  # fmt: skip
    rows += [(each["id"], "alias", f"{each['version']}", "", "", "", _weights(each["targets"])) for each in aliases]
    head = ("name", "state", "generation", "rank", "MiB", "", "source")
    yield Answer({"adapters": adapters, "aliases": aliases}, table(head, rows) if rows else ["no adapters"])


def _load(service: ApiClient, arguments: argparse.Namespace) -> Iterator[Answer]:
    if arguments.path is None:
        if arguments.pin or arguments.lazy or arguments.description:
            raise ConfigError("without a path the name is registered already, and nothing about it changes")
        body = service.call("POST", f"/v1/loras/{quote(arguments.name)}/load")
    else:
        wanted = {"name": arguments.name, "path": arguments.path, "wait": not arguments.lazy, "lazy": arguments.lazy}
        wanted |= {"pinned": True} if arguments.pin else {}
        wanted |= {} if arguments.description is None else {"description": arguments.description}
        body = service.call("POST", "/v1/loras", wanted)
    warnings = [f"warning: {warning}" for warning in body.get("warnings", ())]
    yield Answer(body, [f"{body['id']}: {body['state']}, generation {body['generation']}", *warnings])


def _unload(service: ApiClient, arguments: argparse.Namespace) -> Iterator[Answer]:
    body = service.call("DELETE", f"/v1/loras/{quote(arguments.name)}")
    yield Answer(body, [f"{body['id']}: {body['state']}"])


def _alias(service: ApiClient, arguments: argparse.Namespace) -> Iterator[Answer]:
    is_change = arguments.promote is not None or arguments.rollback is not None or arguments.remove
    if arguments.name is None:
        if is_change:
            raise ConfigError("name the alias to change; without options the command lists all aliases")
        aliases = list(service.list_all("/v1/aliases"))
        yield Answer(aliases, [_alias_line(each) for each in aliases] or ["no aliases"])
        return
    if arguments.targets and is_change:
        raise ConfigError("give either adapters, or one of --promote, --rollback and --remove")
    route = f"/v1/aliases/{quote(arguments.name)}"
    if arguments.targets:
        body = service.call("PUT", route, {"targets": dict(map(_target, arguments.targets))})
    elif arguments.promote is not None:
        body = service.call("POST", f"{route}/promote", {"target": arguments.promote})
    elif arguments.rollback is not None:
        version = {"version": arguments.rollback} if arguments.rollback else {}
        body = service.call("POST", f"{route}/rollback", version)
    else:
        body = service.call("DELETE" if arguments.remove else "GET", route)
    yield Answer(body, [_alias_line(body, "removed" if arguments.remove else None)])


def _alias_line(alias: Mapping[str, Any], what: str | None = None) -> str:
    return f"{alias['id']}: {what or _weights(alias['targets'])} (version {alias['version']})"


def _target(text: str) -> tuple[str, float]:
    name, equals, weight = text.partition("=")
    try:
        return name, float(weight) if equals else 1.0
    except ValueError:
        raise ConfigError(f"{text[:80]!r} is not an adapter, or an adapter, = and a number") from None


def _drain(service: ApiClient, arguments: argparse.Namespace) -> Iterator[Answer]:
    force = "?force=true" if arguments.force else ""
    body = service.call("POST", f"/v1/replicas/{quote(arguments.replica_id, safe='')}/drain{force}")
    yield Answer(body, [f"{body['id']}: {body['state']}"])


def _chat(service: ApiClient, arguments: argparse.Namespace) -> Iterator[Answer]:
    messages: list[dict[str, Any]] = []
    if arguments.system is not None:
        messages.append({"role": "system", "content": arguments.system})
    options = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    body = {"model": arguments.model} | {name: value for name, value in options.items() if value is not None}
    for question in _questions(arguments.prompt):
        messages.append({"role": "user", "content": question})
        request = body | {"messages": messages}
        if arguments.json:
            answer = service.call("POST", INFERENCE_ROUTE, request)
            content = answer["choices"][0]["message"]["content"] or ""
            yield Answer(answer, ())
        else:
            content = ""
            for event in service.events(INFERENCE_ROUTE, request | {"stream": True}):
                piece = event["choices"][0]["delta"].get("content") or "" if event.get("choices") else ""
                content += piece
                print(piece, end="", flush=True)
            print()
        messages.append({"role": "assistant", "content": content})


def _questions(prompt: str | None) -> Iterator[str]:
    """The prompt, or lines of the terminal; what is piped in is one question."""
    if prompt is not None:
        yield prompt
    elif not sys.stdin.isatty():
        yield sys.stdin.read()
    else:
        while True:
            try:
                question = input("> ")
            except EOFError:
                return
            if question.strip():
                yield question


def _logs(service: ApiClient, arguments: argparse.Namespace) -> Iterator[Answer]:
    if not 0 <= arguments.lines <= _MAX_EVENTS:
        raise ConfigError(f"--lines is {arguments.lines}; it is from 0 to {_MAX_EVENTS}")
    name = "" if arguments.name is None else f"&name={quote(arguments.name, safe='')}"
    last_id: int | str | None = None
    limit, num_shown = max(1, arguments.lines), arguments.lines
    while True:
        rows = service.call("GET", f"/v1/events?limit={limit}{name}")["data"]  # newest first
        ids = [row["id"] for row in rows]
        new = rows[: ids.index(last_id)] if last_id in ids else rows
        for row in reversed(new[:num_shown]):
            yield Answer(row, [event_line(row)])
        if not arguments.follow:
            return
        last_id = rows[0]["id"] if rows else last_id
        limit = num_shown = _MAX_EVENTS
        time.sleep(POLL_INTERVAL_S)


def _weights(targets: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={weight:g}" for name, weight in targets.items())


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f}"
