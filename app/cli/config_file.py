"""The `AppConfig` inside a Serve application file, for commands that do not start Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.base_models import load_bases
from app.config import AppConfig
from app.engine.errors import ConfigError

IMPORT_PATH = "app.main:build"


def read_settings(path: Path) -> AppConfig:
    """The settings in a file, of the first base model.

    Raises ConfigError if the file is unreadable, invalid, or has not one polylora application.
    """
    return settings_of(read_document(path), path)


def read_document(path: Path) -> dict[str, Any]:
    """The parsed file. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; CONFIG (or --config) names the file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {yaml_problem(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} has no list of applications; see configs/serve.yaml")
    return content


def yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong with a YAML file, and where, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def settings_of(document: Mapping[str, Any], path: Path) -> AppConfig:
    """The settings of the first base model in a parsed file. Raises ConfigError."""
    return bases_of(document, path)[0]


def bases_of(document: Mapping[str, Any], path: Path) -> tuple[AppConfig, ...]:
    """The settings of each base model of the polylora application in a parsed file. Raises ConfigError."""
    applications = document.get("applications")
    if not isinstance(applications, list):
        raise ConfigError(f"{path} has no list of applications; see configs/serve.yaml")
    ours = [entry for entry in applications if isinstance(entry, Mapping) and entry.get("import_path") == IMPORT_PATH]
    if len(ours) != 1:
        raise ConfigError(f"{path} has {len(ours)} applications with import_path {IMPORT_PATH}; one is needed")
    return load_bases(ours[0].get("args") or {})


def address_in(document: dict[str, Any], host: str | None, port: int | None) -> tuple[str, int]:
    """Host and port: as given, else the file's. Both are written into `document`, for Serve. Raises ConfigError."""
    options = document.get("http_options") or {}
    if not isinstance(options, dict):
        raise ConfigError(
            f"http_options is {options!r}; it must be a mapping with host and port, see configs/serve.yaml"
        )
    host = host or options.get("host") or "127.0.0.1"
    if not isinstance(host, str):
        raise ConfigError(f"http_options.host is {host!r}; it must be a name or an address, quoted if necessary")
    if port is None:
        port = options.get("port", 8000)
    if type(port) is not int or not 1 <= port <= 65_535:
        raise ConfigError(f"port {port!r} (--port, or http_options.port) is not a whole number from 1 to 65535")
    document["http_options"] = options | {"host": host, "port": port}
    return host, port
