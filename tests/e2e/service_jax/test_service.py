"""The end-to-end suite's tests of what an engine does, on the JAX engine."""

from __future__ import annotations

from tests.e2e.service.conftest import Service
from tests.e2e.service.test_adapters_under_traffic import (
    test_a_name_loaded_again_with_new_contents_means_the_new_ones,
    test_load_and_unload_while_traffic_runs,
    test_more_adapters_than_rows_all_get_their_turn,
)
from tests.e2e.service.test_openai_client import (
    test_generate_takes_lists_with_nulls,
    test_logprobs_are_those_of_the_tokens,
)

__all__ = [
    "test_a_name_loaded_again_with_new_contents_means_the_new_ones",
    "test_generate_takes_lists_with_nulls",
    "test_load_and_unload_while_traffic_runs",
    "test_logprobs_are_those_of_the_tokens",
    "test_more_adapters_than_rows_all_get_their_turn",
]


def test_the_cache_of_programs_is_filled(service: Service) -> None:
    assert any((service.loras.parent / "xla").iterdir())


def test_frames_come_through_ray(service: Service) -> None:
    """There is no socket; the other tests read their answers all the same."""
    assert (service.loras.parent / "sockets").is_file()
