"""The page of commands, from argparse."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from app.cli.main import make_parser
from docs.generators.markdown import table


def cli_page() -> str:
    """Every command of `polylora` with its arguments."""
    text = "# Commands\n\n`polylora --help` and `polylora COMMAND --help` print the same. `--verbose` adds the "
    text += "traceback to an error. A failed command exits with status 1 and prints one line to standard error.\n\n"
    return text + "".join(_commands(make_parser()))


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                parser_of = action.choices
                others = [name for name, each in parser_of.items() if each is parser_of[choice.dest]]
                also = "".join(f"; also `{name}`" for name in others if name != choice.dest)
                yield from _command(parser_of[choice.dest], f"{choice.help or ''}{also}")


def _command(parser: argparse.ArgumentParser, says: str) -> Iterator[str]:
    yield f"## {parser.prog}\n\n{says[:1].upper()}{says[1:]}.\n\n"
    rows = [_argument(parser, action) for action in parser._actions if not _is_common(action)]
    if rows:
        yield table(("argument", "default", "description"), rows) + "\n"
    yield from _commands(parser)


def _is_common(action: argparse.Action) -> bool:
    return isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.dest == "verbose"


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str]:
    values = "" if action.nargs == 0 else str(action.metavar or "|".join(map(str, action.choices or ())) or "")
    if action.option_strings:
        name = ", ".join(action.option_strings)
        name += f" {values or action.dest.upper()}" if action.nargs != 0 else ""
    else:
        name = values or action.dest
    says = parser._get_formatter()._expand_help(action) if action.help else ""
    is_set = action.default not in (None, False, [], argparse.SUPPRESS) and "default" not in says
    return f"`{name}`", f"`{action.default}`" if is_set else "", says
