"""A packed adapter in Ray's object store, as it travels between processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from app.engine.wire_format import message


@message
class SharedAdapter(NamedTuple):
    """The `header` and `arrays` of a `PackedAdapter`. The references are in a list because Ray would otherwise resolve
    them and copy the weights into the answer.
    """

    header: dict[str, Any]
    arrays: list[ray.ObjectRef[NDArray[np.uint8]]]
