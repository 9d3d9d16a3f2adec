"""The head of a cluster with Redis dies and returns: tokens flow all the while through the other nodes' ingresses."""

from __future__ import annotations

import asyncio

import httpx

from tests.e2e.cluster.conftest import NodesOfOneMachine
from tests.e2e.cluster.test_nodes import MODELS, ask, body, others, register, returned, traffic

#: How long there is no head, seconds.
AWAY_S = 15.0
#: How long the first registration after its return may take, seconds.
REGISTER_TIMEOUT_S = 180.0


async def register_at_last(url: str, name: str, path: str) -> None:
    """Until it is done; all that is said before is that one is to ask again."""
    async with asyncio.timeout(REGISTER_TIMEOUT_S), httpx.AsyncClient(timeout=REGISTER_TIMEOUT_S) as http:
        while (answer := await http.post(f"{url}/v1/loras?wait=true", json={"name": name, "path": path})).is_error:
            assert answer.status_code == 503, answer.text
            await asyncio.sleep(1)


async def test_the_head_dies_and_returns_while_tokens_flow(lasting_cluster: NodesOfOneMachine) -> None:
    """First its GCS, which everything of Ray asks; then the whole node, with whatever ran there."""
    cluster = lasting_cluster
    urls = await others(cluster, cluster.nodes[0])
    for name in MODELS[1:]:
        await register(urls[0], name, name)
    expected = {model: await ask(urls[0], body(model, 1, 60)) for model in MODELS}
    async with traffic(urls, expected) as took_s:
        for part in ("gcs", "head"):
            await asyncio.to_thread(cluster.do, f"kill {part}")
            assert cluster.gcs is None
            num_before = len(took_s)
            await asyncio.sleep(AWAY_S)
            assert len(took_s) > num_before + len(urls) * len(MODELS), f"nobody is answered without the {part}"
            await asyncio.to_thread(cluster.do, f"start {part}")
            await register_at_last(urls[0], f"after-{part}", "r8")
            assert await ask(urls[-1], body(f"after-{part}", 1, 60)) == expected["r8"]
    assert await returned(cluster, cluster.nodes[0], body("r16", 1, 60)) == expected["r16"]
