"""The settings inside a Serve application file.

In: the YAML that `serve run` takes. Out: its content, and the `AppConfig` of its one polylora application. Commands
that need the settings without starting Ray read them here; Serve itself hands `args` to `app.main:build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.config import AppConfig, load_config
from app.engine.errors import ConfigError

IMPORT_PATH = "app.main:build"


def read_settings(path: Path) -> AppConfig:
    """ConfigError if the file cannot be read, has no such application, several, or bad settings."""
    return settings_of(read_document(path), path)


def read_document(path: Path) -> dict[str, Any]:
    """The whole file. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; CONFIG (or --config) names the file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} has no list of applications; see configs/serve.yaml")
    return content


def settings_of(document: Mapping[str, Any], path: Path) -> AppConfig:
    """The settings of our application in a file's content. Raises ConfigError."""
    applications = document.get("applications")
    if not isinstance(applications, list):
        raise ConfigError(f"{path} has no list of applications; see configs/serve.yaml")
    ours = [entry for entry in applications if isinstance(entry, Mapping) and entry.get("import_path") == IMPORT_PATH]
    if len(ours) != 1:
        raise ConfigError(f"{path} has {len(ours)} applications with import_path {IMPORT_PATH}; one is needed")
    return load_config(ours[0].get("args") or {})
