"""The benchmark of routing: the made set is well formed, and what is measured is what was decided."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from app.deployments.ingress.principal import Principal
from load_tests.control.bench_routing import RoutingResult, accuracy, demo_prompts, run
from load_tests.control.routing_topics import TOPICS


class Letters:
    """Texts as counts of their letters."""

    name = "letters"
    has_price = False

    async def tokenize(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode() for text in texts]

    async def embed(self, token_ids: Sequence[Sequence[int]], caller: Principal | None) -> NDArray[np.float32]:  # noqa: ARG002
        texts = [bytes(of_text).decode().lower() for of_text in token_ids]
        counts = np.array([[1 + text.count(chr(97 + n)) for n in range(26)] for text in texts], np.float32)
        unit: NDArray[np.float32] = counts / np.linalg.norm(counts, axis=1, keepdims=True)
        return unit


def test_the_made_set_is_fifty_descriptions_with_ten_prompts() -> None:
    assert len({topic.name for topic in TOPICS}) == len({topic.description for topic in TOPICS}) == 50
    assert {len(set(topic.prompts)) for topic in TOPICS} == {10}
    for topic in TOPICS:
        assert not [thing for thing in topic.things if thing in topic.description], topic.name


def test_the_threshold_that_is_right_most_often_is_found() -> None:
    asked = [
        RoutingResult("a", "a", 0.5),
        RoutingResult("a", "b", 0.45),
        RoutingResult("b", "b", 0.41),
        RoutingResult(None, "a", 0.3),
    ]
    found = accuracy(asked)
    assert 0.3 < found.threshold <= 0.41
    assert found.best == pytest.approx(2 / 3)
    assert found.at == pytest.approx((2 / 3 + 1) / 2)
    assert accuracy(asked, 0.6).at == 0.5
    assert accuracy(asked, 0.2).at == pytest.approx(1 / 3)


def test_demo_prompts_of_a_split_never_meet_those_of_the_other() -> None:
    seen, held_out = (demo_prompts(split, 8, 12) for split in ("train", "heldout"))
    assert not {prompt for _, prompt in seen} & {prompt for _, prompt in held_out}
    for prompts in (seen, held_out):
        assert {expected for expected, _ in prompts} == {"sql", "extract", "support", "tools", None}
        assert not [prompt for _, prompt in prompts if "tool_response" in prompt]


def test_every_embedder_has_a_line_for_each_set() -> None:
    markdown = run([Letters(), Letters()], num_demo_prompts=3, num_topics=4, num_candidates=200)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    lines = [cells for cells in lines if cells[0] == "letters"]
    assert [len(cells) for cells in lines] == [7, 7, 10, 10, 10, 10]
    for cells in lines:
        assert all(0 <= float(cell.rstrip("%")) <= 100 for cell in cells[3:5])
