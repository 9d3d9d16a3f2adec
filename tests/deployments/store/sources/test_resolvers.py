"""Names become sources that their tenant may use, and no spelling of a name leads anywhere else."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path

import pytest

from app.config import load_config
from app.deployments.store.sources.resolvers import FunctionResolver, Resolver, TemplateResolver, open_resolvers
from app.engine.errors import ConfigError, NotReady, SourceError

DEFAULT = "default"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the operator's adapter, a project's, a folder that is none, and something beside it."""
    for folder in ("root/sql", "root/proj_a/mine", "outside/secret"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "adapter_config.json").write_text("{}")
    (tmp_path / "root" / "card.lora.arrow").write_bytes(b"card")
    (tmp_path / "root" / "notes").write_text("no adapter")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside" / "secret")
    return tmp_path / "root"


def by_function(monkeypatch: pytest.MonkeyPatch, root: Path, answer: object) -> FunctionResolver:
    """A resolver whose function returns `answer`, or raises it."""

    def resolve(name: str, tenant_id: str) -> object:
        del name, tenant_id
        if isinstance(answer, BaseException):
            raise answer
        return answer

    module = types.ModuleType("operators_own")
    module.resolve = resolve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "operators_own", module)
    return FunctionResolver("operators_own:resolve", [root])


def test_a_resolver_of_vllm_runs_as_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finding:
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> types.SimpleNamespace | None:
            assert base_model_name == "org/base"
            if lora_name != "asked":
                return None
            return types.SimpleNamespace(lora_name=lora_name, lora_path=f"{root}/sql", lora_int_id=1)

    class Broken:
        def __init__(self, host: str) -> None: ...

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> None: ...

    module = types.ModuleType("for_vllm")
    module.Finding, module.Broken = Finding, Broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "for_vllm", module)
    resolver = FunctionResolver("for_vllm:Finding", [root], "org/base")
    assert resolver.source("asked", DEFAULT) == f"{root}/sql"
    assert resolver.source("other", DEFAULT) is None
    assert resolver.source("asked", "proj_a") is None, "it knows no tenants"
    with pytest.raises(ConfigError, match="cannot be constructed"):
        FunctionResolver("for_vllm:Broken", [root])


def test_a_name_with_a_slash_is_a_folder_in_a_folder(root: Path) -> None:
    (root / "org").mkdir()
    (root / "sql").rename(root / "org" / "sql")
    resolver = TemplateResolver(f"{root}/{{name}}", [root])
    assert resolver.source("org/sql", DEFAULT) == f"{root}/org/sql"
    assert resolver.source("proj_a/mine", DEFAULT) is None, "a project's folder is not the operator's"
    assert resolver.source("org/../org/sql", DEFAULT) is None
    assert TemplateResolver("hf://{name}@main", [root]).source("org/sql", DEFAULT) == "hf://org/sql@main"


def test_a_folder_or_card_of_the_name_is_found(root: Path) -> None:
    resolver = TemplateResolver(f"{root}/{{name}}", [root])
    assert resolver.source("sql", DEFAULT) == f"{root}/sql"
    assert resolver.source("card.lora.arrow", DEFAULT) == f"{root}/card.lora.arrow"
    assert TemplateResolver("{name}", [root]).source("sql", DEFAULT) == "sql"


@pytest.mark.parametrize(
    "name",
    [
        "nobody",
        "notes",
        "proj_a",
        "link",
        "..",
        "../outside/secret",
        "/etc",
        "proj_a/mine",
        "sql/",
        "",
        "a\0b",
        "{name}",
    ],
)
def test_what_is_no_adapter_of_the_operators_under_the_root_is_not_there(root: Path, name: str) -> None:
    assert TemplateResolver(f"{root}/{{name}}", [root]).source(name, DEFAULT) is None


def test_a_template_beside_the_roots_finds_nothing(root: Path) -> None:
    assert TemplateResolver(f"{root.parent}/outside/{{name}}", [root]).source("secret", DEFAULT) is None
    assert TemplateResolver(f"{root}/../outside/{{name}}", [root]).source("secret", DEFAULT) is None


@pytest.mark.parametrize("template", ["{name}", "{tenant}/{name}"])
def test_a_project_finds_what_is_below_its_own_folder_only(root: Path, template: str) -> None:
    resolver = TemplateResolver(f"{root}/{template}", [root])
    assert resolver.source("mine", "proj_a") == f"{root}/proj_a/mine"
    assert resolver.source("sql", "proj_a") is None
    assert resolver.source("mine", "proj_b") is None


def test_a_uri_is_filled_in_and_not_looked_at(root: Path) -> None:
    assert TemplateResolver("hf://ours/{name}@main", [root]).source("sql", "proj_a") == "hf://ours/sql@main"
    assert TemplateResolver("s3://b/{tenant}/{name}", [root]).source("sql", "proj_a") == "s3://b/proj_a/sql"
    assert TemplateResolver("hf://ours/{name}@main", [root]).source("../theirs/x", "proj_a") is None


@pytest.mark.parametrize(
    ("answer", "tenant_id", "found"),
    [
        (None, DEFAULT, None),
        ("sql", DEFAULT, "sql"),
        ("nobody", DEFAULT, None),
        ("../outside/secret", DEFAULT, None),
        ("hf://ours/x@main", "proj_a", "hf://ours/x@main"),
        ("proj_a/mine", "proj_a", "proj_a/mine"),
        ("sql", "proj_a", None),
        ("proj_a/mine", "proj_b", None),
    ],
)
def test_a_function_of_the_operators_is_held_to_the_tenants_folders(
    monkeypatch: pytest.MonkeyPatch, root: Path, answer: str | None, tenant_id: str, found: str | None
) -> None:
    assert by_function(monkeypatch, root, answer).source("x", tenant_id) == found


@pytest.mark.parametrize(
    "answer",
    [7, b"sql", "hf://ours/x", "x" * 5000, "s3://b/\udcff", "sql\0", "combination:[]", RuntimeError("broken"),
     SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()],
)  # fmt: skip
def test_what_a_function_does_wrong_is_a_source_error(
    monkeypatch: pytest.MonkeyPatch, root: Path, answer: object
) -> None:
    with pytest.raises(SourceError, match=r"operators_own:resolve"):
        by_function(monkeypatch, root, answer).source("x", DEFAULT)


def test_a_function_may_raise_our_errors(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    with pytest.raises(NotReady, match="later"):
        by_function(monkeypatch, root, NotReady("later")).source("x", DEFAULT)


def opened(*resolvers: str, environ: dict[str, str] | None = None) -> tuple[Resolver, ...]:
    settings = {"adapters": {"resolvers": resolvers}} if resolvers else {}
    return open_resolvers(load_config(settings, environ=environ or {}).adapters)


def test_nothing_is_looked_for_unless_it_is_configured(root: Path) -> None:
    assert opened() == ()
    (only,) = opened(environ={"LORA_PATH": str(root)})
    assert only.source("sql", DEFAULT) == f"{root}/sql"
    config = load_config({"adapters": {"resolvers": []}}, environ={"LORA_PATH": str(root)})
    assert open_resolvers(config.adapters) == (), "an empty list is nowhere"


@pytest.mark.parametrize(
    ("resolver", "said"),
    [
        ("sql", "resolvers"),
        ("hf://ours/{name}", "no revision"),
        ("no.such:function", "no.such"),
        ("os:sep", "function"),
    ],
)
def test_a_resolver_that_cannot_be_is_refused(resolver: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(resolver)
