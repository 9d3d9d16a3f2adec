"""Import of a function or class that an operator names by its dotted path."""

from __future__ import annotations

import importlib
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
