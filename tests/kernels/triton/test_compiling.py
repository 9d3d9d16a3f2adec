"""Every GPU kernel compiles for an H200, in bfloat16 too, within its limits: no GPU is needed, nothing is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

#: Bytes of shared memory one program may use on an H200.
MAX_SHARED = 227 * 1024
KERNELS = {
    "_shrink_rows", "_expand_rows", "_shrink_segments", "_expand_segments", "_attend", "_merge_parts", "_rms_norm",
    "_gated_activation", "_rotate_and_write", "_linear", "_route", "_count_pairs", "_place_pairs", "_expert_product",
    "_shrink_experts", "_expand_experts", "_combine", "_rotate_latents", "_attend_latents",
}  # fmt: skip
WITH_PRODUCTS = {
    "_shrink_segments", "_expand_segments", "_attend", "_linear", "_expert_product", "_shrink_experts",
    "_expand_experts", "_attend_latents",
}  # fmt: skip
#: What they read is a few hundred bytes.
SMALL = {"_route", "_count_pairs", "_place_pairs"}


def test_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.kernels.triton.compiling"],
        env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in found} == KERNELS
    for line in found:
        assert line["shared"] <= MAX_SHARED, line
        assert line["atomics"] == 0, line  # sums in an order that depends on timing
        assert line["wide_loads"] > 0 or line["kernel"] in SMALL, line
        assert line["stack"] == 0, line  # registers spilled to memory
        assert (line["tensor_core"] > 0) == (line["kernel"] in WITH_PRODUCTS), line
