"""The costs of an engine behind the protocol are fitted to what its callers see."""

from __future__ import annotations

from pathlib import Path

from app.engine.config import EngineConfig
from app.engine.models.checkpoint import load_checkpoint
from app.simulation.costs import read_costs, write_costs
from load_tests.simulate.measure_vllm import measure
from tests.engine.running import vllm_section, write_model

STEP_S = 0.02


def test_a_steps_time_is_found(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_model(tmp_path / "model"))
    section = vllm_section("fake", step_s=STEP_S) | {"max_loras": 4}
    costs = measure(checkpoint, EngineConfig.model_validate({"vllm": section}), (1, 2, 4), 12, seed=0)
    assert costs.decode_s(2, 32) > STEP_S * 0.9, "the worker sleeps as long in each step"
    assert costs.row_bytes == 4 * sum(a + b for a, b in SHAPES) * 2
    assert "vLLM on " in costs.machine
    write_costs(costs, tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == costs


#: The widths in and out of the seven modules of a layer of the model.
SHAPES = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
