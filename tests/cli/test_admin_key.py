"""The first admin key, and a service that would be open to a network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from app.cli.admin_key import check_exposure, keep_digests, make_admin_key
from app.cli.main import main
from app.config import ADMIN_KEY, DIGEST, MANAGEMENT_TOKEN, AppConfig
from app.deployments.registry.registry import open_registry
from app.deployments.tenancy.auth.key_crypto import is_key, key_digest, new_key
from app.deployments.tenancy.service import SYNC_INTERVAL_S
from app.deployments.tenancy.tenant_store import TenantStore
from app.engine.errors import ConfigError
from app.engine.models import checkpoint


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppConfig:
    opened = SimpleNamespace(spec=SimpleNamespace(digest="d" * 64))
    monkeypatch.setattr(checkpoint, "open_model", lambda *_: opened)
    return AppConfig.model_validate({"adapters": {"state_dir": str(tmp_path / "state")}})


def test_the_first_admin_key_is_printed_once_and_only_its_hash_is_kept(
    settings: AppConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "serve.yaml"
    args = {"adapters": {"state_dir": settings.adapters.state_dir}}
    config.write_text(yaml.safe_dump({"applications": [{"import_path": "app.main:build", "args": args}]}))
    assert main(["create-admin-key", "--config", str(config)]) == 0
    said = capsys.readouterr()
    value = said.out.strip()
    assert is_key(value)
    assert said.err.startswith(f"the key is in the registry in {settings.adapters.state_dir}")
    registry = open_registry(settings, "d" * 64)
    (key,) = TenantStore(registry.database).since(0).keys
    registry.close()
    assert key.is_admin
    assert key.digest == key_digest(value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and value[15:].encode() in path.read_bytes()]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_key_is_printed_when_the_service_that_runs_takes_it(settings: AppConfig, is_running: bool) -> None:
    registry = open_registry(settings, "d" * 64)
    if is_running:
        registry.stores.enter()
        registry.stores.beat(0)
    slept_s: list[float] = []
    make_admin_key(settings, slept_s.append)
    assert len(slept_s) == is_running
    assert all(pause_s > SYNC_INTERVAL_S for pause_s in slept_s)
    registry.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "models.example"])
def test_a_network_is_not_let_in_without_keys(settings: AppConfig, host: str) -> None:
    with pytest.raises(ConfigError, match=r"create-admin-key.*http\.auth: open"):
        check_exposure(settings, host, {})
    for auth in ("open", "keys"):
        chosen = settings.model_copy(update={"http": settings.http.model_copy(update={"auth": auth})})
        check_exposure(chosen, host, {})
    check_exposure(settings, host, {ADMIN_KEY: "some"})
    registry = open_registry(settings, "d" * 64)
    TenantStore(registry.database).keys.create_admin_key("first", None, actor="test")
    registry.close()
    check_exposure(settings, host, {})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_this_machine_is_let_in_without_keys(host: str) -> None:
    check_exposure(AppConfig(), host, {})


def test_what_processes_inherit_are_hashes(settings: AppConfig) -> None:
    key, token = new_key(is_admin=True).value, "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
    environ = {ADMIN_KEY: key, MANAGEMENT_TOKEN: token, "PATH": "/bin"}
    keep_digests(environ)
    kept = {f"{ADMIN_KEY}{DIGEST}": key_digest(key), f"{MANAGEMENT_TOKEN}{DIGEST}": key_digest(token)}
    assert environ == kept | {"PATH": "/bin"}
    keep_digests(environ)
    assert environ == kept | {"PATH": "/bin"}, "what holds hashes already is left as it is"
    check_exposure(settings, "0.0.0.0", environ)
    with pytest.raises(ConfigError, match="create-admin-key"):
        keep_digests({ADMIN_KEY: "hunter2"})
