"""The control plane's benchmark counts what it says, and its small sizes are within the promised bounds."""

from __future__ import annotations

import asyncio

import pytest

from load_tests.control import bench_control
from load_tests.control.bench_control import Costs, carry, digest, names, scale
from load_tests.control.simulated_service import SimulatedService
from load_tests.virtual_time import run_virtually


def test_every_call_of_placement_is_carried_and_counted() -> None:
    async def main() -> Costs:
        costs = Costs()
        service = SimulatedService(2, ["r0", "r1"], lambda: 0.0, carry=lambda placement: carry(placement, costs))
        await service.start()
        await service.ingresses[0].placer.assign([digest(1)])
        await service.close()
        return costs

    costs = run_virtually(main())
    assert costs.num_calls["assign"] == 1
    assert costs.num_calls["report"] >= 4
    assert costs.num_calls["watch"] >= 2
    assert 0 < costs.num_bytes["assign"] < 300
    assert costs.cpu_s > 0


def test_a_small_load_is_answered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_control, "RATE", 100.0)
    rows = dict(asyncio.run(scale(0.5)))
    assert float(rows["placement's CPU, of one core"].split()[0]) > 0
    assert "assign" in rows["calls of placement a second"]


def test_names_are_measured() -> None:
    ((what, measured),) = names(2000)
    assert what.startswith("2,000 names")
    assert measured.split()[1] == "us,"
