"""README and docs: commands, links, settings and generated pages are what the programs have.

Nothing is started: commands are parsed, modules, files and settings are looked up, and pages are rendered again.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import typing
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from app.cli.main import make_parser
from app.config import AppConfig
from app.deployments.ingress.schemas.openai import GenerateBody, GenerateSampling
from app.engine.api import LLM
from docs.generators.results import RESULTS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, while it is imported: pydantic's deprecations
    from docs.generate import pages

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS])
HAND_WRITTEN = [page for page in PAGES if "docs/generate.py" not in page.read_text()[:60]]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


@every_page
def test_every_command_is_one(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser()
    for line in commands(page, "polylora"):
        arguments = [word for word in shlex.split(line) if word not in ("[", "]")]
        with contextlib.suppress(SystemExit):  # --help and --version end so, too
            parser.parse_args(arguments)
        assert not capsys.readouterr().err, f"{page.name}: polylora {line}"


@every_page
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


@every_page
def test_every_body_is_sent_as_what_it_is(page: Path) -> None:
    """A body that curl sends with -d alone is a form's, which the service refuses (415)."""
    for command in curls(page):
        if re.search(r"\s(-d|--data)\s", command):
            assert "Content-Type: application/json" in command, f"{page.name}: {command}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of headings; `mkdocs build --strict` checks those that MkDocs makes."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in _LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {path}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {path}#{anchor}"


def drawn_tree() -> set[str]:
    """Paths in the tree of explanation/architecture.md: lines "a/  b/   words" or "a.py, b.py   words", indented."""
    text = (ROOT / "docs/explanation/architecture.md").read_text().partition("\n## The tree\n")[2].split("```")[1]
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


@every_page
def test_every_path_that_is_named_exists(page: Path) -> None:
    for name in re.findall(r"`((?:app|tests|load_tests|configs|examples|docs)/[\w/.]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_file_that_contributing_names_is_there() -> None:
    """Lists of what one touches: a name is below app/, tests/ or the folder that the line's first path is in."""
    names = re.findall(r"`((?:app|tests|load_tests)/[\w/.<>{},]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 20
    for name in (re.sub(r"<\w+>(\.py)?", "*", name) for name in names):
        choices = re.match(r"(.*)\{(.*)\}(.*)", name)
        for path in [name] if choices is None else [choices[1] + one + choices[3] for one in choices[2].split(",")]:
            assert list(ROOT.glob(path)), f"CONTRIBUTING.md names {name}"


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings and sections."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        arguments = (field.annotation, *typing.get_args(field.annotation))
        for inner in arguments:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from settings(inner, f"{prefix}{name}.")


@every_page
def test_every_setting_that_is_named_exists(page: Path) -> None:
    """`engine.cpu.num_threads` in backticks is a setting; a file name or an attribute of a program is none."""
    known = set(settings(AppConfig))
    sections = "|".join(sorted(AppConfig.model_fields))
    for name in re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:: [^`]*)?`", page.read_text()):
        if not name.endswith((".py", ".generate", ".jsonl")):
            assert name in known, f"{page.name} names {name}"


@cache
def generated() -> dict[Path, str]:
    return pages()


def test_generated_pages_are_fresh() -> None:
    """`make docs` writes them."""
    assert len(generated()) == 5
    for path, text in generated().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is stale: make docs"


def test_the_settings_page_has_every_setting() -> None:
    text = generated()[ROOT / "docs/reference/settings.md"]
    for name in settings(AppConfig):
        assert f"`{name.rpartition('.')[2]}`" in text or f"## {name}\n" in text, name


def test_the_page_of_commands_has_every_command() -> None:
    text = generated()[ROOT / "docs/reference/cli.md"]
    (subparsers,) = (action for action in make_parser()._actions if action.dest == "command")
    assert subparsers.choices is not None
    assert all(f"## {parser.prog}\n" in text for parser in subparsers.choices.values())


def test_results_name_what_measured_them() -> None:
    """Every result file says on which machine, when and by which program it was measured, and its rows fit."""
    files = sorted(RESULTS.glob("*.json"))
    assert len(files) >= 10
    for path in files:
        result = json.loads(path.read_text())
        assert result["machine"], path.name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]), path.name
        module = re.match(r"python -m ([\w.]+)", result["command"])
        assert module is not None, path.name
        assert ROOT.joinpath(*module[1].split(".")).with_suffix(".py").is_file(), path.name
        assert {len(row) for row in result["rows"]} == {len(result["columns"])}, path.name
    assert len(generated()[ROOT / "docs/reference/performance.md"].splitlines()) <= 200


def public_methods(path: str, class_name: str) -> set[str]:
    """Names of a class's methods that callers use, read from its source."""
    (found,) = (
        node
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    methods = (node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {name for name in methods if not name.startswith("_")}


def test_pages_show_the_examples_that_tests_run() -> None:
    """MkDocs includes these files; ruff must not take the directive for Python."""
    for name in ("generate", "ray_job", "in_process"):
        directive = f'``` {{.python}}\n--8<-- "examples/{name}.py"\n```'
        assert sum(directive in page.read_text() for page in DOCS) == 1
        assert (ROOT / "examples" / f"{name}.py").is_file()


def test_the_page_of_the_handle_has_every_method() -> None:
    """Serve itself calls the others."""
    found = public_methods("app/deployments/ingress/deployment.py", "Ingress")
    text = (ROOT / "docs/reference/python-handle.md").read_text()
    missing = [name for name in found - {"make_asgi_app", "reconfigure", "check_health"} if f"`{name}(" not in text]
    assert missing == []


def test_the_page_of_the_class_has_every_method() -> None:
    text = (ROOT / "docs/reference/llm.md").read_text()
    assert [name for name in vars(LLM) if not name.startswith("_") and f"`{name}(" not in text] == []


def test_the_page_of_generate_has_every_field() -> None:
    text = (ROOT / "docs/reference/generate.md").read_text()
    structured = {"response_format", "structured_outputs"}  # and guided_*: structured-outputs.md has them
    fields = {*GenerateBody.model_fields, *GenerateSampling.model_fields} - structured
    assert [name for name in fields if f"`{name}`" not in text and not name.startswith("guided_")] == []


@every_page
def test_pages_are_written_in_plain_words(page: Path) -> None:
    """No commit ids, and none of the words that readers stumble over."""
    text = page.read_text()
    commits = re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b", text)
    words = re.findall(r"\b(?:told|heard|nobody|anew|at hand)\b", text, re.IGNORECASE)
    assert (set(commits) - {"ed25519"}, words) == (set(), [])


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_no_sentence_begins_with_what_it_is_about(page: Path) -> None:
    """Subject first: "Of those …" and "Who asks …" are hard to read."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^(?: {4}|\|).*$", "", prose, flags=re.MULTILINE)
    found = re.findall(r"(?:^|[.:!?]\s+|^[-*] )(?:Of|Those|Who|Whose|As|From)\s[^\n]*", prose, re.MULTILINE)
    assert found == []


def test_the_readme_is_short() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 100
    assert re.findall(r"^    make (\w+)", readme, re.MULTILINE) == ["serve", "test"]


def test_every_control_names_tests_that_exist() -> None:
    """reference/security.md: each row of its tables of requirements ends with path::name of one test or several."""
    page = (ROOT / "docs/reference/security.md").read_text()
    rows = [line for line in page.partition("## OWASP API")[2].splitlines() if re.match(r"\| (API)?\d", line)]
    assert len(rows) > 25
    _check_tests(rows)


def test_every_failure_mode_names_tests_that_exist() -> None:
    page = (ROOT / "docs/reference/failure-modes.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| (?!lost |condition )", line)]
    assert len(rows) > 25
    _check_tests(rows)


def test_every_capability_names_tests_that_exist() -> None:
    page = (ROOT / "docs/reference/capabilities.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| (?!capability )", line)]
    assert len(rows) > 35
    _check_tests(rows)


def _check_tests(rows: list[str]) -> None:
    """The last column of each row has path::name of one test or several, which exist."""
    functions: dict[str, set[str]] = {}
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rsplit("|", 2)[1])
        assert named, row
        for path, name in named:
            if path not in functions:
                tree = ast.walk(ast.parse((ROOT / path).read_text()))
                functions[path] = {n.name for n in tree if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in functions[path], f"{path} has no {name}"
