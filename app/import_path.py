"""Import of a function or class that an operator names by its dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from app.engine.errors import ConfigError


def import_dotted(dotted_path: str, setting: str) -> Any:
    """The object at `package.module.name` or `package.module:name`, named by `setting`.

    Raises ConfigError, and whatever else the module raises when it is imported. The caller checks what the object is.
    """
    module, _, attribute = dotted_path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{setting} {dotted_path!r} cannot be imported: {error}") from error


def construct(kind: Callable[[], Any], dotted_path: str, setting: str) -> Any:
    """An object of a class that `import_dotted` found. Raises ConfigError, whatever the class raises."""
    try:
        return kind()
    except Exception as error:
        # Foreign code: whatever it raises, the setting is invalid.
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        raise ConfigError(f"{setting} {dotted_path!r} cannot be constructed: {reason}") from error
