"""Places in vLLM while several tenants send requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.running import MAX_NUM_SEQS, Served, write_model

PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_a_tenant_alone_has_all_places(folder: Path) -> None:
    served = Served("fake", folder)
    names = [served.submit(PROMPT, tenant_id="flood", max_tokens=200) for _ in range(2 * MAX_NUM_SEQS)]
    served.wait(lambda: served.engine.stats().num_running == MAX_NUM_SEQS)
    assert all(len(served.tokens(name)) == 200 for name in names)
    served.engine.stop(60)


def test_a_flood_leaves_a_place_to_others(folder: Path) -> None:
    """Each request of the other tenant starts before any answer of the flood has ended."""
    served = Served("fake", folder, step_s=0.02)
    assert len(served.answer(PROMPT, tenant_id="one")) == 8
    flood = [served.submit(PROMPT, tenant_id="flood", max_tokens=240) for _ in range(2 * MAX_NUM_SEQS)]
    served.wait(lambda: any(name in served.chunks for name in flood))
    for _ in range(3):
        assert len(served.answer(PROMPT, tenant_id="one")) == 8
        assert not any(served.has_ended(name) for name in flood)
    assert all(len(served.tokens(name)) == 240 for name in flood)
    served.engine.stop(60)
