"""Which forms of the operations there are, and which one a device gets.

In: the configured form and the device's platform. Out: an `Operations`. Rule: a form that the platform cannot run is
refused, never replaced by another.
"""

from __future__ import annotations

from app.engine.errors import ConfigError
from app.engine.xla.cpu_operations import CpuOperations
from app.engine.xla.operations import Operations
from app.engine.xla.xla_operations import XlaOperations


def operations_of(form: str, platform: str) -> Operations:
    """The form called `form`, or with "auto" the platform's own; ConfigError for one that the platform cannot run."""
    if form == "cpu" and platform != "cpu":
        raise ConfigError(f"engine.xla.form is 'cpu' but the device is a {platform}; set auto")
    return CpuOperations() if form == "cpu" or (form == "auto" and platform == "cpu") else XlaOperations()
