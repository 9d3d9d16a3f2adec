"""Checks before a start. Each raises a ConfigError with the cause and the remedy.

They leave nothing behind but folders that the service would create as well.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.ray_env import (
    DEFAULT_MAX_CONNECTIONS,
    HA_PROXY_PORTS,
    MAX_CONNECTIONS,
    connections_for_files,
    files_for_connections,
    max_open_files,
)
from app.config import AppConfig
from app.engine.config import EngineConfig
from app.engine.errors import ConfigError, PolyloraError, SourceError
from app.engine.models.download.model_download import Progress, resolve_model
from app.kernels.machine.disk_cache import default_cache_dir
from app.private_folder import make_private

if TYPE_CHECKING:
    from app.engine.models.checkpoint import Checkpoint
    from app.engine.models.spec import ModelSpec

_log = logging.getLogger(__name__)

#: Variables that provide Ray's token; otherwise it is created in the home directory.
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")

#: With two ingresses and two engines the raylet has 100 open files and an idle ingress 76; each connection is one more.
MIN_OPEN_FILES = 512


def check_folders(settings: AppConfig, environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a folder that the service could not write to or could not have for itself."""
    check_cache()
    state = Path(settings.adapters.state_dir)
    _check_folder(state, "the registry", "set POLYLORA_STATE_DIR (or adapters.state_dir) to another folder")
    make_private(state)
    _check_folder(Path(settings.logs.folder), "the log", "set logs.folder to another one")
    has_token = any(environ.get(name) for name in _TOKEN_VARIABLES)
    if environ.get("RAY_ADDRESS") or environ.get("RAY_AUTH_MODE", "token") != "token" or has_token:
        return
    folder = _home(lambda: Path.home() / ".ray")
    way_out = "set RAY_AUTH_TOKEN to a secret of your own, or HOME to another folder"
    token = folder / "auth_token"
    if not token.is_file():
        _check_folder(folder, "Ray's token", way_out)
        return
    try:
        # Ray creates both with the umask of the moment; whoever has the token runs code as this user.
        folder.chmod(0o700)
        token.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"{token} cannot be made private ({error.strerror}); {way_out}") from error


def check_device(engine: EngineConfig) -> str:
    """What the device section finds on this machine, in words. Raises ConfigError if its packages are not installed or
    this machine lacks the device."""
    engine.check_installed()
    from app.engine.factory import check_device_is_here  # heavy

    return check_device_is_here(engine)


def product_form(engine: EngineConfig) -> str | None:
    """The form of rounded products that `engine.cpu.compute` needs, if it does. Raises ConfigError if none works.

    The first call on a machine compiles kernels for some seconds.
    """
    if engine.compute == "float32":
        return None
    from app.engine.models import weight_stacks  # heavy

    return weight_stacks.product_form(engine.compute)


def fetch_embedder(settings: AppConfig, progress: Progress) -> None:
    """Download the encoder that model "auto" needs. A failure is logged: all other models work without it."""
    uri = settings.semantic_router.embedder
    if "://" not in uri:
        return
    try:
        resolve_model(uri, progress=progress)
    except SourceError as error:
        _log.warning(
            "model 'auto' will not work: its embedder is not available (%s); set semantic_router.embedder to a local "
            "encoder or to base",
            error,
        )


def compile_kernels(settings: AppConfig, checkpoint: Checkpoint) -> None:
    """Compile what an engine of this base model, and the encoder for model "auto", run on this machine's CPU.

    A second process compiles half of it. Raises CheckpointError, and ConfigError if that process fails.
    """
    from app.engine.factory import new_engine
    from app.engine.warm_up import warm_up

    other = multiprocessing.get_context("spawn").Process(target=_compile_others, args=(settings,))
    other.start()
    if settings.engine.cpu is not None:
        with closing(new_engine(checkpoint, settings.engine)) as engine:
            warm_up(engine)
    other.join()
    if other.exitcode:
        raise ConfigError("the kernels of sampling or of the encoder for model 'auto' are not compiled: see above")


def _compile_others(settings: AppConfig) -> None:
    """Compile what the engine runs after its step, and, with what others leave of the CPU, the encoder."""
    from app.deployments.ingress.semantic_router.embedders import load_encoder
    from app.engine.factory import compile_sampling

    compile_sampling(settings.engine)
    os.nice(10)  # a service may start before the first request for "auto"
    if settings.semantic_router.embedder != "base":
        with load_encoder(settings.semantic_router.embedder) as llm:
            llm.embed(["a", "b"])


def check_cache() -> None:
    """Raises ConfigError if the cache of models and kernels is not writable."""
    _check_folder(_home(default_cache_dir), "models and compiled kernels", "set POLYLORA_CACHE to another folder")


def check_model(settings: AppConfig, path: Path) -> ModelSpec:
    """The spec of the base model at `path`. Raises CheckpointError, and ConfigError for unsuitable settings."""
    from app.engine.engine import max_model_len_of
    from app.engine.models.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(path, settings.model.name).computed_in(settings.engine.arithmetic)
    if checkpoint.needs_vllm and settings.engine.vllm is None:
        raise ConfigError(f"{checkpoint.needs_vllm}; set engine.vllm or take another checkpoint than {path}")
    max_model_len_of(settings.engine, checkpoint.spec)
    return checkpoint.spec


def check_preloaded(settings: AppConfig) -> None:
    """Raises ConfigError for a preloaded adapter that cannot be loaded: local ones must exist."""
    from app.deployments.registry.models import check_source  # heavy, as the next
    from app.deployments.store.adapter_reader import open_sources

    sources = open_sources(settings.adapters, base_name=settings.model.name)
    for adapter in settings.adapters.preload:
        try:
            check_source(adapter.path)
            sources.locate(adapter.path)
        except PolyloraError as error:
            raise ConfigError(f"adapters.preload: {adapter.name!r}: {error}") from error


def check_ha_proxy_ports(environ: Mapping[str, str]) -> None:
    """Raises ConfigError if another service uses HAProxy's ports; HAProxy would be restarted again and again."""
    for name, what in HA_PROXY_PORTS:
        if name in environ:
            check_port("127.0.0.1", int(environ[name]), f"{what} would be there; set {name} to another")


def check_open_files(environ: Mapping[str, str]) -> str | None:
    """A sentence if HAProxy holds fewer connections than by default, because it may open too few files; or None.

    Raises ConfigError if they are too few for the connections that are configured, or for Ray.
    """
    files, configured = max_open_files(), environ.get(MAX_CONNECTIONS)
    fits, wanted = connections_for_files(files), int(configured or DEFAULT_MAX_CONNECTIONS)
    raise_it = "raise the hard limit (`ulimit -Hn`, LimitNOFILE=, `docker run --ulimit nofile=`)"
    if files < MIN_OPEN_FILES:
        raise ConfigError(f"a process may open {files} files here and Ray needs {MIN_OPEN_FILES}; {raise_it}")
    if wanted <= fits:
        return None
    if configured:
        raise ConfigError(
            f"{MAX_CONNECTIONS} is {wanted}, for which HAProxy opens {files_for_connections(wanted)} files, and a "
            f"process may open {files} here; {raise_it}, or set {MAX_CONNECTIONS} to at most {fits}"
        )
    return (
        f"HAProxy holds {fits} connections instead of {wanted}, because a process may open {files} files here; "
        f"{raise_it} to {files_for_connections(wanted)}"
    )


def check_port(host: str, port: int, way_out: str) -> None:
    """Raises ConfigError if the port cannot be bound; Serve would only log it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # another port would not help
                way_out = "choose another --host (or http_options.host): an address of this machine"
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); {way_out}") from error


def _check_folder(folder: Path, what: str, way_out: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to {folder} ({error.strerror}), the folder of {what}; {way_out}") from error


def _home(path: Callable[[], Path]) -> Path:
    try:
        return path()
    except RuntimeError as error:
        raise ConfigError("this user has no home directory; set HOME to a folder that can be written") from error
