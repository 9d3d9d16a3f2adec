"""What torch may be asked on floats where a result must have the same bits on every processor and in any batch.

In: code that runs inside `ExactOperations()`. Out: an AssertionError at the first operation whose results are the
library's choice: a product of matrices, a sum of floats, an exponential. What is allowed moves or compares numbers, or
computes each from one or two others by an operation that IEEE 754 rounds in one way.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MOVES = """
    _to_copy _unsafe_view alias cat chunk clone contiguous copy_ detach embedding empty_like empty_strided expand
    fill_ flatten full_like gather index index_put_ item lift_fresh masked_fill movedim new_empty new_zeros numpy_T
    permute reshape resolve_conj resolve_neg select slice split squeeze t to transpose unflatten unsqueeze view
"""
_CHOICES = "amax argmax clamp ge gt maximum nan_to_num sort where"
#: On a CPU `rsqrt` is a square root and a division (`sqrt` is the Math Kernel Library's).
_ROUNDED_IN_ONE_WAY = "add add_ ceil div mul neg round rsqrt sub sub_"
_ALLOWED = frozenset(f"{_MOVES} {_CHOICES} {_ROUNDED_IN_ONE_WAY}".split())


class ExactOperations(TorchDispatchMode):
    """Fails at the first operation on floats that is not exact; `counts` those that are, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        given = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
        if any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in given):
            name = func.overloadpacket.__name__
            assert name in _ALLOWED, f"the bits of {func} are the library's choice"
            assert kwargs.get("alpha", 1) == 1, f"{func} multiplies and adds: processors round that once or twice"
            self.counts[name] += 1
        return func(*args, **kwargs)
