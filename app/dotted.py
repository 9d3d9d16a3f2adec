"""What an operator names by a dotted path: a function or a class of his own.

In: a dotted path (`package.module.name` or `package.module:name`) and the setting that holds it. Out: what stands
there. Rule: a path that leads nowhere is a ConfigError that names the setting; what the thing has to be is its
reader's to check.
"""

from __future__ import annotations

import importlib
from typing import Any

from app.engine.errors import ConfigError


def import_dotted(dotted_path: str, setting: str) -> Any:
    """What stands at `dotted_path`. Raises ConfigError, and whatever else the module raises when it is imported."""
    module, _, attribute = dotted_path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{setting} {dotted_path!r} cannot be imported: {error}") from error
