"""The `polylora` command: one subcommand per thing an operator does at a shell.

    polylora serve --config configs/serve.yaml    fetch the model, start the service, stay until ctrl-C
    polylora fetch --config configs/serve.yaml    get the base model, with progress
    polylora convert adapters/sql sql.lora.arrow  turn an adapter into one mapped file, or back
    polylora inspect sql.lora.arrow               show an adapter's ranks, targets, norms and size
    polylora check adapters/sql                   would it load on the settings' base (--base: on another), or why not
    polylora merge adapters/sql merged/           the base with an adapter merged into it, as a folder
    polylora keygen signing.pem                   make a key for signing adapters
    polylora keygen --admin                       make the first key that manages tenants
    polylora sign adapters/sql --key signing.pem
    polylora tenants create acme                  a project and its first key; limits, usage and more
    polylora apply configs/adapters.yaml          make a running service's adapters what the file says
    polylora register names.jsonl                 many adapters by name and place, read when they are first used
    polylora status                               how a running service is
    polylora doctor --config configs/serve.yaml   would a service start here, and what could it hold
    polylora plan --trace log.jsonl --slo-ttft 1  how many replicas a recorded traffic needs

In: arguments. Out: an exit status; what is expected to go wrong is one line on stderr, not a traceback.
A subcommand's module is imported when it runs, so that `fetch` starts without torch or Ray.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TextIO

from app.cli.adapters import add_commands, add_config_option
from app.cli.apply import add_apply
from app.cli.capacity import add_plan
from app.cli.doctor import add_doctor
from app.cli.merge import add_merge
from app.cli.register import add_register
from app.cli.signing import add_signing_commands
from app.cli.status import add_status
from app.cli.tenants import add_tenants
from app.engine.errors import PolyloraError
from app.version import version


def make_parser() -> argparse.ArgumentParser:
    """What the command takes; `arguments.run(arguments)` does it and returns an exit status."""
    parser = argparse.ArgumentParser(prog="polylora", description="One base model, many LoRA adapters.")
    parser.add_argument("--version", action="version", version=f"polylora {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_serve(commands)
    _add_fetch(commands)
    add_commands(commands)
    add_merge(commands)
    add_signing_commands(commands)
    add_apply(commands)
    add_register(commands)
    add_tenants(commands)
    add_status(commands)
    add_doctor(commands)
    add_plan(commands)
    for command in commands.choices.values():
        command.add_argument("--verbose", action="store_true", help="show where an error comes from")
    _describe_subcommands(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return int(arguments.run(arguments))
    except PolyloraError as error:
        return _failed(arguments, str(error), getattr(error, "details", ""))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads has seen enough (`| head`); Python would complain again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # a bug, ours or another's: its trace is for who asks
        said = str(error).strip().partition("\n")[0]
        return _failed(arguments, f"{type(error).__name__}: {said}; --verbose shows where it comes from")


def _describe_subcommands(parser: argparse.ArgumentParser) -> None:
    """Have the help of each subcommand, and of theirs, begin with what the list of them says it does."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                subcommand = action.choices[listed.dest]
                subcommand.description = listed.help
                _describe_subcommands(subcommand)


def _failed(arguments: argparse.Namespace, message: str, details: str = "") -> int:
    """Say why a command ends, in one line, and the whole of it to who asks. Called while the error is handled."""
    if arguments.verbose:
        traceback.print_exc()
        print(details, file=sys.stderr)
    print(f"polylora {arguments.command}: {message}", file=sys.stderr)
    return 1


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="run the service of a configuration until ctrl-C")
    add_config_option(parser, "a Serve application file")
    parser.add_argument("--host", help="address to listen on instead of the file's")
    parser.add_argument("--port", type=int, help="port to listen on instead of the file's")
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard too (127.0.0.1:8265)")
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from app.cli.config_file import read_settings
    from app.cli.preflight import check_cache, check_model
    from app.cli.serve import serve_until_stopped
    from app.engine.models.download.model_download import resolve_model

    settings = read_settings(arguments.config)
    check_cache()
    with ProgressLine(sys.stderr) as line:
        path = resolve_model(settings.model.uri, progress=line.show)
    is_encoder = check_model(settings, path).encoder is not None
    return serve_until_stopped(
        arguments.config, arguments.host, arguments.port, dashboard=arguments.dashboard, is_encoder=is_encoder
    )


def _add_fetch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("fetch", help="get the base model of a configuration and check that it loads")
    add_config_option(parser, "a Serve application file")
    parser.set_defaults(run=_fetch)


def _fetch(arguments: argparse.Namespace) -> int:
    from app.cli.config_file import read_settings
    from app.cli.preflight import check_cache
    from app.engine.models.checkpoint import load_checkpoint
    from app.engine.models.download.model_download import resolve_model

    model = read_settings(arguments.config).model
    if "://" in model.uri:
        check_cache()
    started_s = time.monotonic()
    with ProgressLine(sys.stderr) as line:
        path = resolve_model(model.uri, progress=line.show)
    spec = load_checkpoint(path, model.name).spec
    print(
        f"{spec.name}: {spec.family}, {len(spec.layers)} layers of {spec.hidden_size}, digest {spec.digest[:12]} "
        f"({time.monotonic() - started_s:.1f} s)\n{path}"
    )
    return 0


class ProgressLine:
    """One line that is overwritten on a terminal; elsewhere, a line per quarter so that logs stay short."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._last: tuple[str, int] | None = None

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._last is not None:
            self._stream.write("\n")

    def show(self, what: str, done: int, total: int | None) -> None:
        """`app.engine.models.download.model_download.Progress`."""
        if self._terminal:
            if self._last is not None and self._last[0] != what:
                self._stream.write("\n")
            self._last = (what, 0)
            self._stream.write("\r" + _bar(what, done, total) + "\x1b[K")
            self._stream.flush()
            return
        step = (what, 0 if not total else 4 * done // total)
        if step != self._last:
            self._last = step
            print(_bar(what, done, total), file=self._stream, flush=True)


def _bar(what: str, done: int, total: int | None) -> str:
    if not total:
        return f"{what} …"
    filled = 24 * done // total
    return f"{what} [{'#' * filled}{'.' * (24 - filled)}] {done / 1e6:.1f} of {total / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
