"""Totals, and a bounded number of tenants."""

from __future__ import annotations

from app.engine.meter import MAX_TENANTS, OTHER_TENANTS, EngineMeter


def test_tenants_beyond_the_limit_are_counted_together() -> None:
    meter = EngineMeter()
    for index in range(MAX_TENANTS + 50):
        meter.count_admission(f"t{index}", 3, 1)
        meter.count_generated_token(f"t{index}")
        meter.count_adapter_write(f"t{index}", 10)
    tenants = meter.tenants()
    assert len(tenants) == MAX_TENANTS + 1
    assert tenants[OTHER_TENANTS].prompt_tokens == 150
    assert sum(t.prompt_tokens for t in tenants.values()) == meter.num_prompt_tokens
    assert sum(t.cached_tokens for t in tenants.values()) == meter.num_cached_tokens
    assert sum(t.completion_tokens for t in tenants.values()) == meter.num_tokens_generated
    assert sum(t.adapter_write_bytes for t in tenants.values()) == meter.num_adapter_write_bytes
