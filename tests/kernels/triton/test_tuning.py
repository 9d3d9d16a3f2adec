"""Measured configurations: found by device and shape, absent elsewhere; the shipped file is honest about itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from app.kernels import tuning
from app.kernels.bgmv import triton as bgmv
from app.kernels.paged_attention import triton as paged_attention
from app.kernels.sgmv import triton as sgmv
from tests.kernels.triton.tables import random_tables
from tests.seeds import rng


def test_a_device_uses_its_own_file_and_deterministic_mode_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_tables(rng(), 64, (48,), torch.float16).rows
    measured = sgmv.configuration(4, 16, rows, 80)._replace(num_splits=1, shrink_warps=2)
    key = sgmv.key(4, 16, rows, 80)
    (tmp_path / "my_gpu.json").write_text(json.dumps({"configurations": {key: measured._asdict()}}))
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "My GPU" if device.index == 7 else "Other")
    assert tuning.tuned_config(torch.device("cuda", 7), key) == measured._asdict()
    assert tuning.tuned_config(torch.device("cuda", 7), bgmv.key(4, rows, 80)) is None
    assert tuning.tuned_config(torch.device("cuda", 6), key) is None
    assert tuning.tuned_config(torch.device("cpu"), key) is None
    monkeypatch.setattr(
        sgmv, "tuned_config", lambda _device, wanted: tuning.tuned_config(torch.device("cuda", 7), wanted)
    )
    assert sgmv.configuration(3, 16, rows, 80) == measured  # 3 segments are in the bucket of 4
    assert sgmv.configuration(3, 16, rows, 80, batch_invariant=True) != measured
    tuning._of_device.cache_clear()


def test_the_shipped_file_claims_nothing_it_has_not() -> None:
    for path in tuning.FOLDER.glob("*.json"):
        content = json.loads(path.read_text())
        assert path.name == tuning.file_name(content["device"])
        assert content["measured"] == bool(content["configurations"])
        for key, values in content["configurations"].items():
            kernel = {"bgmv": bgmv, "sgmv": sgmv, "paged_attention": paged_attention}[key.partition("/")[0]]
            assert set(values) == set(kernel.Configuration._fields), key
