"""`polylora completion`: a script for bash, zsh or fish that completes commands, options and choices.

It is written from the argument parsers, so it knows what this version knows: `source <(polylora completion bash)`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

_BASH = """\
_polylora() {
    local word="${COMP_WORDS[COMP_CWORD]}" path="polylora" part words=""
    for part in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        [[ "@PATHS@" == *"|$path $part|"* ]] && path="$path $part"
    done
    case "$path" in
@CASES@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ ${#COMPREPLY[@]} -eq 0 && "$word" != -* ]]; then COMPREPLY=($(compgen -f -- "$word")); fi
}
complete -o filenames -F _polylora polylora
"""


def add_completion(commands: Any, make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("completion", help="print a script that completes commands in a shell")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))

    def run(arguments: argparse.Namespace) -> int:
        print(completion_script(make_parser(), arguments.shell), end="")
        return 0

    parser.set_defaults(run=run)


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of one shell; zsh runs bash's."""
    words = dict(_words(parser, ("polylora",)))
    if shell == "fish":
        return "complete -c polylora -f\n" + "".join(
            f"complete -c polylora -n '{_fish_condition(path, words)}' -a '{each}'\n"
            for path, found in words.items()
            for each in found
        )
    paths = f"|{'|'.join(map(' '.join, words))}|"
    cases = "\n".join(f'        "{" ".join(path)}") words="{" ".join(found)}";;' for path, found in words.items())
    script = _BASH.replace("@PATHS@", paths).replace("@CASES@", cases)
    return "autoload -Uz bashcompinit && bashcompinit\n" + script if shell == "zsh" else script


def _words(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """For a command and each below it, its path and what may follow: commands, choices and options."""
    found: list[str] = []
    below: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        found += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            below += action.choices.items()
        if action.choices is not None:
            found += map(str, action.choices)
    yield path, tuple(found)
    for name, command in below:
        yield from _words(command, (*path, name))


def _fish_condition(path: tuple[str, ...], words: Any) -> str:
    deeper = [each[len(path)] for each in words if each[: len(path)] == path and len(each) == len(path) + 1]
    conditions = [f"__fish_seen_subcommand_from {name}" for name in path[1:]]
    conditions += [f"not __fish_seen_subcommand_from {' '.join(deeper)}"] if deeper else []
    return "; and ".join(conditions) or "true"
