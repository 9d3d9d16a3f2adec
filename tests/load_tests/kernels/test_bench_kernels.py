"""The GPU benchmark on a machine without one: every form is right, nothing is called timed, the table is a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.kernels.bgmv import triton as bgmv
from load_tests.kernels import bench_kernels, kernel_checks, lora_forms, tune_kernels
from load_tests.kernels.gpu_timing import Clock
from load_tests.kernels.lora_forms import Sizes, Workload


@pytest.mark.skipif(bench_kernels.HAS_GPU, reason="with a GPU this takes minutes: run the benchmark itself")
def test_without_a_gpu_it_checks_and_times_nothing() -> None:
    lines, text = bench_kernels.run(1.0)
    assert all(line["passed"] for line in lines), text
    assert {line["form"] for line in lines} == {*lora_forms.FORMS, "attention"}
    assert "nothing was timed" in text
    assert not any("seconds" in line for line in lines)


def test_peft_computes_the_same() -> None:
    workload = Workload(Sizes(40, 24, (8, 4), 9, 3), 1, torch.float32, torch.device("cpu"))
    add, base = lora_forms.peft(workload)
    workload.y[0] = base(workload.x[0])
    assert lora_forms.check(workload, add) < 1e-6


def test_a_wrong_form_and_one_that_raises_fail_their_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(_workload: Workload) -> lora_forms.Form:
        raise RuntimeError("no such instruction")

    wrong = {"idle": lambda _workload: lambda _layer, _y: None, "raising": raises}
    monkeypatch.setattr(lora_forms, "FORMS", wrong)
    lines = [line for line in kernel_checks.checks(torch.device("cpu")) if line["form"] in wrong]
    assert lines
    assert not any(line["passed"] for line in lines)
    assert all("no such instruction" in line["failure"] for line in lines if line["form"] == "raising")


def test_every_kind_of_cell_gives_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that calls once and says a second; on the CPU, in the one half type its interpreter multiplies."""

    def second(call: Callable[[], object], _num_repeats: int = 1) -> float:
        call()
        return 1.0

    monkeypatch.setattr(bench_kernels, "graph_seconds", second)
    monkeypatch.setattr(bench_kernels, "event_seconds", second)
    monkeypatch.setattr(lora_forms, "cold_layers", lambda _sizes: 2)
    for name, value in {"DEVICE": torch.device("cpu"), "BF16": torch.float16}.items():
        monkeypatch.setattr(bench_kernels, name, value)
    sizes, rates = Sizes(40, 24, (8, 4), 5, 3), bench_kernels.Ceilings(1e3, 1e6)
    lora = list(bench_kernels.time_lora(sizes, rates, lora_forms.FORMS))
    lora += bench_kernels.time_peft(sizes)
    others = [*bench_kernels.time_attention(1, 1, 20, rates), *bench_kernels.time_attention(1, 6, 6, rates)]
    monkeypatch.setattr(bench_kernels, "_COLD_BYTES", 1)
    others += bench_kernels.time_linear(3, 20, 40)
    assert not [line for line in lora + others if "seconds" not in line]
    assert [line["form"] for line in lora] == [*lora_forms.FORMS, "PEFT"]
    assert lora[0]["of_bandwidth"] == pytest.approx(2 * sizes.num_bytes(2) / 1e3)  # two layers in a second
    assert lora[-1]["seconds"] == 0  # the base product's second is not PEFT's
    json.dumps(lora + others)


def test_tuning_keeps_the_fastest_configuration_that_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bgmv is fastest with two splits; sgmv never gives right results, and what does not is not timed."""
    times = iter([4.0, 3.0, 2.0])  # as it is (four), one, two

    def seconds(call: Callable[[], object], _num_repeats: int = 1) -> float:
        call()
        return next(times)

    right = lora_forms.check

    def check(workload: Workload, form: lora_forms.Form) -> float:
        return float("nan") if found() else right(workload, form)

    def found() -> dict[str, dict[str, int]]:
        path = tmp_path / "cpu.json"
        return json.loads(path.read_text())["configurations"] if path.exists() else {}

    monkeypatch.setattr(tune_kernels, "graph_seconds", seconds)
    monkeypatch.setattr(lora_forms, "cold_layers", lambda _sizes: 1)
    monkeypatch.setattr(lora_forms, "check", check)
    monkeypatch.setattr(tune_kernels, "CHOICES", dict.fromkeys(tune_kernels.CHOICES, ()) | {"num_splits": (1, 2, 4)})
    sizes = Sizes(600, 24, (8,), 2, 2)
    tune_kernels.tune([sizes], Clock(100), tmp_path / "cpu.json", torch.device("cpu"), torch.float16)
    configurations = found()
    assert len(configurations) == 1
    kept = bgmv.Configuration(**configurations["bgmv/2/600/24/1/8/float16"])
    assert kept.num_splits == 2


def test_bytes_and_operations_of_a_cell() -> None:
    sizes = Sizes(100, 30, (8, 16), 4, 2)  # two rows of rank 8, two of rank 16
    assert sizes.num_bytes(2) == 2 * (24 * 130 + 4 * 160)
    assert sizes.num_operations == 2 * 130 * 48


def test_the_grid_is_the_whole_one_and_is_run_once() -> None:
    rates = bench_kernels.Ceilings(1.0, 1.0)
    names = [name for name, _ in bench_kernels.cells(rates)]
    assert len(names) == len(set(names))
    assert {sizes.name for sizes in bench_kernels.lora_cells()} <= set(names)
    first = [sizes.name for sizes in bench_kernels.lora_cells() if sizes.ranks == (16,) and sizes.depth == 4096]
    assert names[: len(first)] == first


def test_the_table_reads_the_lines() -> None:
    sizes = Sizes(4096, 14336, (16,), 64, 64)
    ours = {"kind": "lora", "cell": sizes.name, **sizes.__dict__, "bytes": 1 << 27, "of_matrix_rate": 0.01}
    lines: list[dict[str, Any]] = [
        {"kind": "machine", "device": "GPU", "bandwidth": 4.3e12, "matrix": 7.9e14},
        {**ours, "form": "bgmv", "seconds": 1.25e-5, "of_bandwidth": 0.81},
        {**ours, "form": "sgmv", "passed": False},
        {"kind": "lora", "form": "PEFT", **sizes.__dict__, "seconds": 5e-3},
        {"kind": "attention", "cell": "attention", "form": "ours", "seconds": 1e-4, "of_bandwidth": 0.5},
        {"kind": "skipped", "cells": ["the rest"]},
    ]
    text = bench_kernels.table(lines)
    assert "12.5" in text
    assert "5000.0" in text
    assert "1 of 1, lowest 0.81" in text
    assert "left out for lack of time: 1 cells, from 'the rest' on" in text
