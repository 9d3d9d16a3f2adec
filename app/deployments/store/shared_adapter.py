"""A packed adapter in Ray's object store, as it travels: a header and references.

In: nothing. Out: `SharedAdapter`. The references are inside a list: Ray passes those on as they are, and would copy the
weights into the answer otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from app.engine.wire_format import message


@message
class SharedAdapter(NamedTuple):
    """`header` and `arrays` of a `PackedAdapter`."""

    header: dict[str, Any]
    arrays: list[ray.ObjectRef[NDArray[np.uint8]]]
