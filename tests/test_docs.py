"""What README and docs tell a reader to type is what the programs take.

In: the code blocks and links of README.md, CONTRIBUTING.md and docs/. Rule: nothing is started; commands are parsed,
modules and files are looked for.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.main import make_parser

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
_FENCED = re.compile(r"^```(?:bash)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)")


def blocks(page: Path) -> Iterator[str]:
    """Code blocks; lines that a backslash continues are one."""
    text = page.read_text()
    for block in [*_FENCED.findall(text), *_INDENTED.findall(text)]:
        yield block.replace("\\\n", " ")


def commands(page: Path, program: str) -> list[str]:
    """Lines of code blocks that run a program, without what comes before its name or behind its arguments."""
    found = re.findall(rf"^[ \w=$]*?\(?\b{program} +([^#)\n]*)", "\n".join(blocks(page)), re.MULTILINE)
    return [arguments.split(" && ")[0].split(" | ")[0].strip() for arguments in found]


def test_some_commands_are_found() -> None:
    """The patterns above still find what is there."""
    assert sum(len(commands(page, "polylora")) for page in PAGES) >= 15
    assert sum(len(commands(page, "python3? -m")) for page in PAGES) >= 10
    assert sum(len(list(curls(page))) for page in PAGES) >= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser()
    for line in commands(page, "polylora"):
        arguments = [word for word in shlex.split(line) if word not in ("[", "]")]
        with contextlib.suppress(SystemExit):  # --help and --version end so, too
            parser.parse_args(arguments)
        assert not capsys.readouterr().err, f"{page.name}: polylora {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_is_run_exists(page: Path) -> None:
    for line in commands(page, "python3? -m"):
        module = line.split()[0]
        if module in ("pytest", "venv"):
            continue
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{page.name}: {line}"


def curls(page: Path) -> Iterator[str]:
    for block in blocks(page):
        yield from re.findall(r"(?:^|\s)(curl .*?)(?=\n\s*curl |\n\s*\n|\Z)", block, re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_body_is_sent_as_what_it_is(page: Path) -> None:
    """A body that curl sends with -d alone is a form's, which the service refuses (415)."""
    for command in curls(page):
        if re.search(r"\s(-d|--data)\s", command):
            assert "Content-Type: application/json" in command, f"{page.name}: {command}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in _LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {path}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {path}#{anchor}"


def drawn_tree() -> set[str]:
    """Paths in the tree of docs/architecture.md: lines "a/  b/   words" or "a.py, b.py   words", indented by depth."""
    text = (ROOT / "docs/architecture.md").read_text().partition("\n## The tree\n")[2].split("```")[1]
    found: set[str] = set()
    parents: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"(?:[\w/]+(?:/|\.py),?(?: +|$))+", line.lstrip())
        assert names is not None, line
        first, *others = re.split(r",? +", names[0].strip())
        parent = first[: first.rindex("/", 0, -1) + 1] if depth == 0 and "/" in first[:-1] else "".join(parents[:depth])
        paths = [first if depth == 0 else parent + first, *(parent + other for other in others)]
        found.update(path.rstrip("/") for path in paths)
        parents[depth:] = [first]
    return found


def test_the_tree_in_the_docs_is_the_tree() -> None:
    """Every folder and every loose module of `app` has its place there, and nothing else."""
    folders = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "app").rglob("*.py")}
    folders |= {str(path.parent.relative_to(ROOT)) for path in (ROOT / "app/kernels").rglob("*.json")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "app").glob("*.py")} - {"app/__init__.py"}
    drawn = {path for path in drawn_tree() if path.startswith("app")}
    assert drawn - {"app"} == (folders | modules) - {"app"}


def test_every_file_that_contributing_names_is_there() -> None:
    """Lists of what one touches: a name is below app/, tests/ or the folder that the line's first path is in."""
    names = re.findall(r"`((?:app|tests|load_tests)/[\w/.<>{},]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 20
    for name in (re.sub(r"<\w+>(\.py)?", "*", name) for name in names):
        choices = re.match(r"(.*)\{(.*)\}(.*)", name)
        for path in [name] if choices is None else [choices[1] + one + choices[3] for one in choices[2].split(",")]:
            assert list(ROOT.glob(path)), f"CONTRIBUTING.md names {name}"
