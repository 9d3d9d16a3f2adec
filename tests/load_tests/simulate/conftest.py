"""Ray Serve is imported here first, for all tests below: its own warnings are not ours, and ours are errors."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
