"""The `polylora` command and the settings inside a Serve application file."""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from app.cli.api_client import DEFAULT_URL
from app.cli.config_file import read_settings
from app.cli.main import ProgressLine, main, make_parser
from app.config import DEFAULT_MODEL_URI, load_config
from app.engine.errors import ConfigError

ROOT = Path(__file__).parents[2]


def write_config(path: Path, **model: str) -> Path:
    content = {"applications": [{"name": "a", "import_path": "app.main:build", "args": {"model": model}}]}
    path.write_text(yaml.safe_dump(content))
    return path


def test_fetch_says_what_it_has(demo_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "c.yaml", uri=str(demo_gguf), name="demo")
    assert main(["download", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("demo: llama, 30 layers of 576, digest ")
    assert str(demo_gguf) in out


def test_make_can_do_what_its_head_names() -> None:
    named = re.findall(r"^# make (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"serve", "test"} <= set(named)
    done = subprocess.run(["make", "-n", *named], cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_after_a_download_with_compile_nothing_is_compiled(tmp_path: Path) -> None:
    """It also runs before Ray is installed, as `make serve` does it."""
    environment = os.environ | {"POLYLORA_CACHE": str(tmp_path)}
    download = "import sys; sys.modules['ray'] = None; from app.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["download", "--compile", "--config", "configs/serve.yaml"]
    subprocess.run(
        [sys.executable, "-c", download, *arguments], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    use = """
from pathlib import Path
from app.cli.config_file import read_settings
from app.deployments.ingress.semantic_router.embedders import load_encoder
from app.engine.api import LLM
from app.kernels.machine.jit import compile_seconds
settings = read_settings(Path("configs/serve.yaml"))
with LLM(settings.model.uri, settings.engine) as llm:
    llm.generate(["a", "b c"], ["examples/adapters/sql", None])
with load_encoder(settings.semantic_router.embedder) as encoder:
    encoder.embed(["a", "b c d", "e"])
print(compile_seconds())
"""
    command = [sys.executable, "-c", use]
    used = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert used.stdout.strip() == "0.0", used.stderr


def test_what_goes_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "c.yaml", uri=str(tmp_path / "absent"))
    assert main(["download", "--config", str(config)]) == 1
    assert capsys.readouterr().err == f"polylora download: no base model at {tmp_path / 'absent'}\n"


def test_a_trace_is_for_who_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "c.yaml", uri=str(tmp_path / "absent"))
    assert main(["download", "--config", str(config), "--verbose"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith(f"polylora download: no base model at {tmp_path / 'absent'}\n")


def test_a_bug_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("of a table\nand more")

    monkeypatch.setattr("app.cli.config_file.read_settings", broken)
    assert main(["download", "--config", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("polylora download: KeyError: ")
    assert main(["download", "--config", str(tmp_path), "--verbose"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Closed(io.TextIOWrapper):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("app.cli.config_file.read_settings", lambda _: print("a line", file=closed))
    with (tmp_path / "out").open("wb") as file:
        closed = Closed(file)
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["download", "--config", str(tmp_path)]) == 141
    assert capsys.readouterr().err == ""


def test_bare_it_helps_and_its_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"polylora {project['version']}\n"


def subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                yield subcommand
                yield from subcommands(subcommand)


@pytest.mark.parametrize("parser", list(subcommands(make_parser())), ids=lambda parser: parser.prog)
def test_each_subcommand_says_what_it_does_and_with_which_settings(parser: argparse.ArgumentParser) -> None:
    assert parser.description, "its --help would be a list of options"
    for action in parser._actions:
        if action.dest in ("config", "url", "file", "source"):
            assert action.help, f"{parser.prog}: {action.dest}"
        if action.dest in ("config", "url"):
            default = DEFAULT_URL if action.dest == "url" else "configs/serve.yaml"
            assert f"default: {default}" in (action.help or "")


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"# caf\xe9\napplications: []\n")
    with pytest.raises(ConfigError, match=r"c\.yaml is not UTF-8 \(byte 5\)"):
        read_settings(path)


def test_a_home_directory_that_is_not_known_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "c.yaml", uri="~nobody-of-this-name/model")
    assert main(["download", "--config", str(config)]) == 1
    assert capsys.readouterr().err.startswith(
        "polylora download: ~nobody-of-this-name/model begins with a home directory"
    )
    adapters: dict[str, object]
    for adapters in ({"roots": ["~nobody-of-this-name/x"]}, {"state_dir": "~nobody-of-this-name/x"}):
        with pytest.raises(ConfigError, match="~nobody-of-this-name/x begins with an unknown home directory"):
            load_config({"adapters": adapters}, environ={})


def test_fetch_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from app.cli.main import main\n"
        f"assert main(['download', '--config', {str(write_config(tmp_path / 'c.yaml', uri=str(tmp_path)))!r}]) == 1\n"
        "print(sorted({'torch', 'ray', 'fastapi', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=6000
    )
    assert done.stdout == "[]\n"
    assert "config.json" in done.stderr


@pytest.mark.parametrize("has_checkout", [True, False])
def test_bench_finds_its_programs_from_any_folder(tmp_path: Path, has_checkout: bool) -> None:
    """The script `polylora` has not the working directory among its places; an editable install adds `app` only."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import app, app.cli.main; sys.path.pop(0)\n"
        f"if not {has_checkout}: app.__file__ = {str(tmp_path / 'app' / '__init__.py')!r}\n"
        "sys.exit(app.cli.main.main(['bench', '--help']))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=6000,
    )  # fmt: skip
    if has_checkout:
        assert (done.returncode, done.stderr) == (0, "")
        assert "--arrivals" in done.stdout
    else:
        assert done.returncode == 1
        assert done.stderr.startswith(
            "polylora bench: bench needs the folder load_tests; install polylora from a checkout"
        )


def test_the_shipped_configuration_is_read() -> None:
    assert read_settings(ROOT / "configs" / "serve.yaml").model.uri == DEFAULT_MODEL_URI


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML: line 1, column 5: expected the node content, but found '<stream end>'"),
        ("a: \x01", "not valid YAML: unacceptable character"),
        ("[]", "no list of applications"),
        ("applications: []", "0 applications"),
        ("applications: [{import_path: x}, 3]", "0 applications"),
        (
            "applications: [{import_path: 'app.main:build', args: {modle: {}}}]",
            "modle is an unknown key; did you mean 'mod",
        ),
        (
            "applications: [{import_path: 'app.main:build', args: {engine: {num_kv_block: 9}}}]",
            "engine.num_kv_block is an unknown key; did you mean 'num_kv_blocks'",
        ),
        ("applications: [{import_path: 'app.main:build'}, {import_path: 'app.main:build'}]", "2 applications"),
    ],
)
def test_a_file_without_our_settings_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_settings(tmp_path / "c.yaml")


def test_progress_is_short_in_a_log_and_one_line_on_a_terminal() -> None:
    log, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    for stream in (log, terminal):
        with ProgressLine(stream) as line:
            line.show("downloading", 0, None)
            for done in range(101):
                line.show("unpacking", done * 10**6, 10**8)
    assert len(log.getvalue().splitlines()) == 6  # the download, then 0 to 100 % in quarters
    assert "100.0 of 100.0 MB" in log.getvalue().splitlines()[-1]
    assert terminal.getvalue().count("\n") == 2
    assert terminal.getvalue().rstrip("\n").endswith("[########################] 100.0 of 100.0 MB\x1b[K")
