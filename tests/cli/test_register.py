"""`polylora register`: lines become calls of some thousand adapters, and what is wrong is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import register
from app.cli.api_client import ApiClient, ApiError
from app.cli.main import main


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """What the service is asked; it knows one adapter of each call already."""
    made: list[tuple[str, str, Any]] = []

    def call(self: ApiClient, method: str, route: str, body: Any = None) -> dict[str, Any]:  # noqa: ARG001
        made.append((method, route, body))
        return {"num_registered": len(body["adapters"]) - 1, "num_unchanged": 1}

    monkeypatch.setattr(ApiClient, "call", call)
    monkeypatch.setattr(register, "BATCH", 2)
    return made


def test_lines_are_sent_together(
    calls: list[tuple[str, str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"name": f"a{n}", "path": f"hf://org/a{n}@main"} for n in range(3)]
    rows[1]["description"] = "writes SQL"
    file = tmp_path / "names.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert main(["register", str(file)]) == 0
    assert calls == [("POST", "/v1/loras/manifest", {"adapters": some}) for some in (rows[:2], rows[2:])]
    assert capsys.readouterr().out == "1 adapters registered, 2 as they were\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"name": "a", "path": "a"}\nsql\n', "line 2 is not JSON"), ("[1]\n", "line 1 is not an object")],
)
def test_a_wrong_line_is_named(
    calls: list[tuple[str, str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "names.jsonl").write_text(text, encoding="utf-8")
    assert main(["register", str(tmp_path / "names.jsonl")]) == 1
    assert said in capsys.readouterr().err
    assert calls == []


def test_what_the_service_says_of_one_is_said_of_its_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "names.jsonl"
    file.write_text('{"name": "a", "path": "a"}\n\n{"name": "b", "path": "b"}\n{"nam": "c"}\n', encoding="utf-8")
    refusals = iter(["adapters.1.name: Field required", "the database is away"])

    def call(self: ApiClient, method: str, route: str, body: Any = None) -> dict[str, Any]:  # noqa: ARG001
        if {"nam": "c"} in body["adapters"]:
            raise ApiError(next(refusals))
        return {"num_registered": 1, "num_unchanged": 0}

    monkeypatch.setattr(ApiClient, "call", call)
    monkeypatch.setattr(register, "BATCH", 3)
    assert main(["register", str(file)]) == 1
    assert f"polylora register: {file}, line 3: name: Field required" in capsys.readouterr().err
    assert main(["register", str(file)]) == 1
    assert "polylora register: the database is away" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["register", "nowhere.jsonl"]) == 1
    assert "cannot read nowhere.jsonl" in capsys.readouterr().err
