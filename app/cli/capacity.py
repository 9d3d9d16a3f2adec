"""`polylora capacity`: how many replicas a recorded traffic needs, and which limit one replica fewer would reach.

Nothing is started: the service's own decisions run on a virtual clock, with a table of what steps and loads take.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.adapters import add_config_option
from app.cli.config_file import read_settings
from app.engine.config import EngineConfig
from app.engine.errors import ConfigError

if TYPE_CHECKING:
    from app.simulation.replica import ReplicaSize

#: vLLM's own default of max_num_batched_tokens for a server.
VLLM_BATCHED_TOKENS = 2048


def add_capacity(commands: Any) -> None:
    parser = commands.add_parser("capacity", help="compute how many replicas a recorded traffic needs")
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, each with at least arrival_s")
    parser.add_argument(
        "--slo-ttft", type=float, required=True, metavar="S", help="objective: seconds to the first token"
    )
    parser.add_argument(
        "--percentile", type=float, default=99.0, help="percentage of the requests that must meet the objective"
    )
    add_config_option(parser, "a Serve application file with the replica's settings")
    parser.add_argument("--costs", type=Path, help="times of steps and loads (JSON); default: a laptop with two cores")
    parser.add_argument("--rank", type=int, default=16, help="rank of every adapter in the trace")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="used where the trace has none")
    parser.add_argument("--output-tokens", type=int, default=64, help="used where the trace has none")
    parser.add_argument(
        "--kv-tokens", type=int, help="tokens that a replica's KV memory holds; vLLM's log has its number"
    )
    parser.add_argument("--max-replicas", type=int, default=256)
    parser.set_defaults(run=_capacity)


def _replica_size(engine: EngineConfig, kv_tokens: int | None) -> ReplicaSize:
    """Raises ConfigError where only vLLM knows how many KV tokens there are."""
    from app.simulation.replica import ReplicaSize

    size = ReplicaSize(
        max_num_seqs=engine.max_num_seqs,
        lora_pool_rows=engine.lora_pool_rows,
        max_loras=engine.max_loras,
        kv_tokens=kv_tokens or engine.num_kv_blocks * engine.block_size,
        eviction=engine.lora_eviction_policy,
        rank_alignment=engine.rank_alignment,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        prefill_step_s=engine.target_step_ms / 1000,
    )
    if engine.vllm is None:
        return size
    if kv_tokens is None:
        raise ConfigError(
            "engine.vllm sizes its KV memory when it starts; add --kv-tokens, the number behind "
            '"GPU KV cache size" in its log'
        )
    batched = engine.vllm.extra_args.get("max_num_batched_tokens", VLLM_BATCHED_TOKENS)
    return replace(size, max_num_batched_tokens=batched, prefill_step_s=0.0)


def _capacity(arguments: argparse.Namespace) -> int:
    from app.simulation.costs import DEFAULT_COSTS, read_costs
    from app.simulation.fleet import Plan
    from app.simulation.planning import plan_fleet
    from app.simulation.trace import read_trace
    from app.simulation.traffic import from_trace

    settings = read_settings(arguments.config)
    engine = settings.engine
    try:
        entries = read_trace(arguments.trace.read_text().split("\n"), arguments.trace)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the trace cannot be read: {error}") from None
    traffic = from_trace(entries, arguments.rank, arguments.prompt_tokens, arguments.output_tokens)
    costs = read_costs(arguments.costs or DEFAULT_COSTS)
    size = _replica_size(engine, arguments.kv_tokens)
    plan = Plan(1, costs, size, settings.placement, settings.adapters.host_cache_bytes)
    need = plan_fleet(traffic, plan, arguments.slo_ttft, arguments.percentile, arguments.max_replicas)
    print(f"times of {costs.machine}")
    print(f"replicas       {need.num_replicas}")
    print(f"first token    {need.ttft_s:.3f} s at p{arguments.percentile:g}; hit rate {need.hit_rate:.3f}")
    print(f"rank rows      {need.rank_rows} of {engine.lora_pool_rows} in use on one replica at most")
    host = f"{need.host_bytes} bytes hold all adapters; adapters.host_cache_bytes: {plan.host_bytes}"
    print(f"host memory    {host}")
    print(f"first limit    {need.first_limit}")
    return 0
