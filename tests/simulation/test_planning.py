"""The smallest fleet that keeps an objective, and why a smaller one does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli.capacity import _replica_size
from app.cli.main import main
from app.engine.config import EngineConfig
from app.engine.errors import ConfigError
from app.simulation.costs import read_costs, write_costs
from app.simulation.fleet import Plan, simulate
from app.simulation.planning import plan_fleet
from app.simulation.replica import ReplicaSize
from app.simulation.result import percentile
from tests.simulation.test_fleet import traffic

PLAN = Plan(1, read_costs(), ReplicaSize(lora_pool_rows=64, rank_alignment=16, max_loras=5))


def test_one_replica_fewer_does_not_keep_the_objective() -> None:
    crowd = traffic(400, rate=30.0)
    need = plan_fleet(crowd, PLAN, 1.0, 99, 64)
    assert need.num_replicas > 1
    assert need.ttft_s <= 1.0
    fewer = simulate(crowd, replace(PLAN, num_replicas=need.num_replicas - 1), 0)
    assert percentile(fewer.first_token_s, 99) > 1.0
    assert need.host_bytes == round(24 * 16 * PLAN.costs.row_bytes)


def test_what_first_limit_is_told() -> None:
    few_rows = replace(PLAN, size=ReplicaSize(lora_pool_rows=16, rank_alignment=16, max_loras=2))
    assert plan_fleet(traffic(200, rate=20.0), few_rows, 1.0, 95, 64).first_limit.startswith("rank rows")
    few_places = replace(PLAN, size=ReplicaSize(max_num_seqs=1, lora_pool_rows=1024))
    assert plan_fleet(traffic(200, rate=20.0), few_places, 1.0, 95, 64).first_limit.startswith("sequences in a batch")
    assert plan_fleet(traffic(20, rate=0.1), PLAN, 5.0, 99, 64).first_limit == "nothing: one replica is enough"


def test_an_objective_that_nothing_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 replicas have their first tokens after .* more than 0.001 s"):
        plan_fleet(traffic(50), PLAN, 0.001, 99, 2)


def test_the_command_reads_a_trace_and_says_what_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"arrival_s": index * 0.1, "model": f"a{index % 7}"}) for index in range(100)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    write_costs(replace(read_costs(), machine="a test"), tmp_path / "costs.json")
    arguments = ["capacity", "--trace", str(tmp_path / "trace.jsonl"), "--slo-ttft", "2"]
    assert main([*arguments, "--costs", str(tmp_path / "costs.json")]) == 0
    said = capsys.readouterr().out
    assert "times of a test\nreplicas " in said
    assert "first limit " in said
    (tmp_path / "trace.jsonl").write_text("{}")
    assert main(arguments) == 1
    assert "line 1" in capsys.readouterr().err


def test_with_vllm_the_command_has_to_be_told_its_kv_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"arrival_s": index * 0.1, "model": f"a{index % 7}"}) for index in range(100)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    engine = {"vllm": {"python": "python", "max_loras": 2, "max_lora_rank": 16}}
    application = {"import_path": "app.main:build", "args": {"engine": engine}}
    (tmp_path / "serve.yaml").write_text(json.dumps({"applications": [application]}))
    arguments = ["capacity", "--trace", str(tmp_path / "trace.jsonl"), "--slo-ttft", "30"]
    arguments += ["--config", str(tmp_path / "serve.yaml")]
    assert main(arguments) == 1
    assert "add --kv-tokens" in capsys.readouterr().err
    assert main([*arguments, "--kv-tokens", "4096"]) == 0
    assert " of 32 in use" in capsys.readouterr().out, "two slots, each as large as the largest rank"
    size = _replica_size(EngineConfig.model_validate(engine), 4096)
    assert (size.kv_tokens, size.rank_alignment, size.max_num_batched_tokens, size.prefill_step_s) == (
        4096,
        16,
        2048,
        0,
    )


@pytest.mark.parametrize(("field", "value"), [("step_s", -1), ("row_s", "x"), ("no_such", 1)])
def test_a_table_of_costs_that_is_none_is_refused(field: str, value: object, tmp_path: Path) -> None:
    table = json.loads((Path(__file__).parents[2] / "app/simulation/costs.json").read_text())
    (tmp_path / "costs.json").write_text(json.dumps(table | {field: value}))
    with pytest.raises(ConfigError, match=field):
        read_costs(tmp_path / "costs.json")
