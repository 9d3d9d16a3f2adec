"""The `polylora` command.

    polylora serve --config configs/serve.yaml    download the model, start the service, run until ctrl-C
    polylora download --config configs/serve.yaml download the base model
    polylora convert adapters/sql sql.lora.arrow  turn an adapter into an Arrow card, or back
    polylora inspect sql.lora.arrow               show an adapter's ranks, targets, norms and size
    polylora check adapters/sql                   check that an adapter loads on the settings' base (--base: another)
    polylora merge adapters/sql merged/           write the base model with an adapter merged into it
    polylora keygen signing.pem                   make a key for signing adapters
    polylora sign adapters/sql --key signing.pem
    polylora create-admin-key                     make the first key that manages tenants
    polylora tenants create acme                  create a project and its first key; also limits, keys and more
    polylora apply configs/adapters.yaml          make a running service's adapters match a file
    polylora register names.jsonl                 register many adapters, to be loaded at first use
    polylora status                               show a running service; also ps
    polylora ls                                   list its adapters and aliases; also load, unload, alias, logs -f
    polylora chat sql "How many users?"           ask a model
    polylora bench --url … --models sql           measure a service under load
    polylora completion bash                      complete commands in a shell
    polylora doctor --config configs/serve.yaml   check whether a service would start here, and what it could hold
    polylora capacity --trace log.jsonl --slo-ttft 1  how many replicas a recorded traffic needs

Expected errors are one line on stderr and an exit status, not a traceback. Modules of subcommands are imported when
they run, so `download` starts without torch or Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import app
from app.cli.adapters import add_commands, add_config_option
from app.cli.apply import add_apply
from app.cli.capacity import add_capacity
from app.cli.client_commands import add_client_commands
from app.cli.completion import add_completion
from app.cli.doctor import add_doctor
from app.cli.register import add_register
from app.cli.status import add_status
from app.cli.tenants import add_create_admin_key, add_tenants
from app.engine.errors import ConfigError, PolyloraError
from app.redaction import escape_control_chars
from app.version import version


def make_parser() -> argparse.ArgumentParser:
    """The argument parser; `arguments.run(arguments)` runs the command and returns an exit status."""
    parser = argparse.ArgumentParser(prog="polylora", description="One base model, many LoRA adapters.")
    parser.add_argument("--version", action="version", version=f"polylora {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_serve(commands)
    _add_download(commands)
    add_commands(commands)
    add_apply(commands)
    add_register(commands)
    add_create_admin_key(commands)
    add_tenants(commands)
    add_status(commands)
    add_client_commands(commands)
    add_doctor(commands)
    add_capacity(commands)
    _add_bench(commands)
    add_completion(commands, make_parser)
    for command in dict.fromkeys(commands.choices.values()):  # an alias of a command is the same parser
        command.add_argument("--verbose", action="store_true", help="print the traceback of an error")
    _describe_subcommands(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status."""
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    num_parsed = 1 if words[:1] == ["bench"] else len(words)
    arguments = parser.parse_args(words[:num_parsed])
    if num_parsed < len(words):
        arguments.options = words[num_parsed:]
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        with contextlib.redirect_stdout(_EscapedStream(sys.stdout)):
            return int(arguments.run(arguments))
    except PolyloraError as error:
        return _fail(arguments, str(error), getattr(error, "details", ""))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone (`| head`); Python would complain again at its flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # a bug: print the traceback only with --verbose
        message = str(error).strip().partition("\n")[0]
        return _fail(arguments, f"{type(error).__name__}: {message}; --verbose prints the traceback")


def _describe_subcommands(parser: argparse.ArgumentParser) -> None:
    """Use each subcommand's line in the command list as the description in its own help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                subcommand = action.choices[listed.dest]
                subcommand.description = listed.help
                _describe_subcommands(subcommand)


def _fail(arguments: argparse.Namespace, message: str, details: str = "") -> int:
    """Print why a command failed; with --verbose also the traceback. Called while the error is handled."""
    if arguments.verbose:
        traceback.print_exc()
        print(details, file=sys.stderr)
    print(escape_control_chars(f"polylora {arguments.command}: {message}", keep="\n"), file=sys.stderr)
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
    from app.cli.doctor import limit_line
    from app.cli.preflight import check_cache, check_model, fetch_embedder
    from app.cli.serve import serve_until_stopped
    from app.engine.models.download.model_download import resolve_model
    from app.machine_memory import memory_limit_bytes

    settings = read_settings(arguments.config)
    check_cache()
    with ProgressLine(sys.stderr) as line:
        path = resolve_model(settings.model.uri, progress=line.show)
        fetch_embedder(settings, line.show)
    spec = check_model(settings, path)
    if warning := limit_line(spec, settings, memory_limit_bytes()):
        print(f"polylora: {warning}", file=sys.stderr, flush=True)
    is_encoder = spec.encoder is not None
    return serve_until_stopped(
        arguments.config, arguments.host, arguments.port, dashboard=arguments.dashboard, is_encoder=is_encoder
    )


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    # `main` hands its options on to `load_tests.http.run`: argparse would take them for its own.
    parser = commands.add_parser("bench", help="measure a service under load (in a checkout of this project)")
    parser.set_defaults(run=_bench, options=[])


def _bench(arguments: argparse.Namespace) -> int:
    checkout = Path(app.__file__).parents[1]
    if not (checkout / "load_tests").is_dir():
        raise ConfigError("bench needs the folder load_tests; install polylora from a checkout (pip install -e .)")
    sys.path.append(str(checkout))  # an editable install finds the package `app` only
    try:
        from load_tests.http.run import main as run_load_test
    except ModuleNotFoundError as error:
        raise ConfigError(f"bench needs {error.name}: pip install -e '.[test]' in {checkout}") from error
    run_load_test(arguments.options)
    return 0


def _add_download(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("download", help="download the base model of a configuration and check that it loads")
    add_config_option(parser, "a Serve application file")
    parser.add_argument("--compile", action="store_true", help="also compile the kernels that a service of it uses")
    parser.set_defaults(run=_download)


def _download(arguments: argparse.Namespace) -> int:
    from app.cli.config_file import read_settings
    from app.cli.preflight import check_cache, compile_kernels, fetch_embedder
    from app.engine.models.checkpoint import load_checkpoint
    from app.engine.models.download.model_download import resolve_model

    settings = read_settings(arguments.config)
    model = settings.model
    if any("://" in uri for uri in (model.uri, settings.semantic_router.embedder)):
        check_cache()
    started_s = time.monotonic()
    with ProgressLine(sys.stderr) as line:
        path = resolve_model(model.uri, progress=line.show)
        fetch_embedder(settings, line.show)
    checkpoint = load_checkpoint(path, model.name).computed_in(settings.engine.arithmetic)
    spec = checkpoint.spec
    print(
        f"{spec.name}: {spec.family}, {len(spec.layers)} layers of {spec.hidden_size}, digest {spec.digest[:12]} "
        f"({time.monotonic() - started_s:.1f} s)\n{path}"
    )
    if arguments.compile:
        compile_kernels(settings, checkpoint)
        print(f"kernels are compiled ({time.monotonic() - started_s:.1f} s)")
    return 0


class _EscapedStream(io.TextIOBase):
    """A text stream for what commands print: names, descriptions and errors of others cannot control the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(escape_control_chars(text, keep="\n\t"))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


class ProgressLine:
    """A progress line, overwritten on a terminal; elsewhere one line per quarter, so that logs stay short."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._last: tuple[str, int] | None = None

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._last is not None:
            self._stream.write("\n")

    def show(self, what: str, done: int, total: int | None) -> None:
        """A `model_download.Progress` callback."""
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
