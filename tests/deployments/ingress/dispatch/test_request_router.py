"""How an ingress places requests, over placement's own service, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from app.config import LimitsConfig
from app.engine.errors import NotReady, QueueFull
from load_tests.control.simulated_service import SimulatedIngress, SimulatedService, request
from load_tests.virtual_time import run_virtually


def ids(number: int) -> list[str]:
    return [f"r{index:02d}" for index in range(number)]


def digest(number: int) -> str:
    return f"{number:064x}"


def virtually(
    num_ingresses: int,
    num_replicas: int,
    *,
    limits: LimitsConfig | None = None,
    resident: dict[str, list[str]] | None = None,
) -> Callable[[Callable[[SimulatedService], Awaitable[None]]], Callable[[], None]]:
    """A test of a service whose requests take a tenth of a second."""

    def decorate(test: Callable[[SimulatedService], Awaitable[None]]) -> Callable[[], None]:
        async def main() -> None:
            service = SimulatedService(num_ingresses, ids(num_replicas), lambda: 0.1, limits=limits, resident=resident)
            await service.start()
            await test(service)
            await service.close()

        def run() -> None:
            run_virtually(main())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


async def seconds(work: Coroutine[Any, Any, None]) -> float:
    """How long it takes, by the loop's clock."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await work
    return loop.time() - began_s


@virtually(1, 4)
async def test_a_base_request_does_not_wait_for_adapters_without_a_home(service: SimulatedService) -> None:
    (ingress,) = service.ingresses
    ingress.placer.delay_s = 0.5
    cold = []
    for index in range(50):
        cold.append(asyncio.create_task(seconds(ingress.answer(request(f"c{index}", digest(index))))))
        await asyncio.sleep(0.001)
    base = [asyncio.create_task(seconds(ingress.answer(request(f"b{i}")))) for i in range(50)]
    assert max(await asyncio.gather(*base)) < 0.101
    took_s = await asyncio.gather(*cold)
    assert 0.5 < max(took_s) < 1.2
    assert len(ingress.placer.questions) == 2, "those that came while the first was answered are in one question"
    ingress.placer.questions.clear()
    assert await seconds(ingress.answer(request("again", digest(3)))) < 0.101, "its home is known"
    assert ingress.placer.questions == []


@virtually(1, 2)
async def test_homes_that_nobody_gives_are_decided_here(service: SimulatedService) -> None:
    (ingress,) = service.ingresses

    async def no_answer(_: object) -> None:
        return

    ingress.placer.assign = no_answer  # type: ignore[method-assign,assignment]
    await asyncio.gather(*(ingress.answer(request(f"c{i}", digest(7))) for i in range(5)))
    assert len({replica_id for replica_id, _ in ingress.replicas.submitted}) == 1, "and always alike"


@virtually(8, 32)
async def test_one_ingress_that_reaches_nobody_is_nobody_else_s_trouble(service: SimulatedService) -> None:
    sick, *others = service.ingresses
    sick.replicas.broken.update(ids(32))
    asked = [asyncio.create_task(sick.answer(request(f"s{i}"))) for i in range(8)]
    for _ in range(12):
        took_s = await asyncio.gather(*(seconds(ingress.answer(request("r"))) for ingress in others))
        assert max(took_s) < 0.11, "without a pause"
        await asyncio.sleep(0.5)
    for ingress in service.ingresses:
        assert ingress.placer.view.num_replicas == 32
    sick.replicas.broken.clear()
    await asyncio.sleep(10.0)
    assert await seconds(sick.answer(request("well again"))) < 0.11
    for task in asked:
        task.cancel()


@virtually(2, 4)
async def test_a_replica_that_cannot_be_reached_is_tried_without_requests_and_more_and_more_seldom(
    service: SimulatedService,
) -> None:
    sick, well = service.ingresses
    sick.replicas.silent.add("r00")
    took_s = []
    for _ in range(600):
        took_s.append(await seconds(sick.answer(request("r"))))
    assert sum(second > 0.11 for second in took_s) <= 1, "one request finds out, in the time to attach"
    assert sick.replicas.calls["r00"] <= 12
    assert "r00" in well.connections.usable
    assert "r00" not in sick.connections.usable


@virtually(1, 2)
async def test_a_dead_replica_leaves_the_table_by_missed_reports(service: SimulatedService) -> None:
    (ingress,) = service.ingresses
    service.silent.add("r00")
    ingress.replicas.broken.add("r00")
    for _ in range(20):
        assert await seconds(ingress.answer(request("r"))) < 0.11, "it goes on to the other at once"
        await asyncio.sleep(0.2)
    assert set(ingress.placer.view.replicas) == {"r01"}


LIMITS = LimitsConfig(max_pending_requests_per_adapter=10, max_pending_cold_requests=25, adapter_load_timeout_s=60.0)


def hang(ingress: SimulatedIngress) -> None:
    """Replicas never answer: an adapter's source hangs."""
    ingress.replicas._service_s = lambda: 1e6


@virtually(1, 2, limits=LIMITS, resident={"r00": [digest(99)]})
async def test_requests_for_cold_adapters_are_bounded_and_nothing_else_is(service: SimulatedService) -> None:
    (ingress,) = service.ingresses
    hang(ingress)
    tasks = [asyncio.create_task(seconds(ingress.answer(request(f"a{i}", digest(1))))) for i in range(100)]
    for number in (2, 3):
        tasks += [
            asyncio.create_task(seconds(ingress.answer(request(f"{number}{i}", digest(number))))) for i in range(9)
        ]
    await asyncio.sleep(0.01)
    refused = [task for task in tasks if task.done()]
    assert len(refused) == 90 + 3
    assert all(isinstance(task.exception(), QueueFull) for task in refused)
    assert "limits.max_pending_requests_per_adapter is 10" in str(tasks[50].exception())
    assert "limits.max_pending_cold_requests is 25" in str(tasks[-1].exception())
    warm = [asyncio.create_task(ingress.answer(request(f"w{i}", digest(99)))) for i in range(50)]
    await asyncio.sleep(0.01)
    ingress.replicas._service_s = lambda: 0.1
    assert await seconds(ingress.answer(request("base"))) < 0.11
    await asyncio.sleep(50.0)
    assert len(ingress.cold._pending._total) == 25
    await asyncio.sleep(11.0)
    assert len(ingress.cold._pending._total) == 0
    late = [task for task in tasks if task not in refused]
    assert all(isinstance(task.exception(), NotReady) for task in late)
    assert "limits.adapter_load_timeout_s" in str(late[0].exception())
    assert not ingress.cold._pending._groups
    assert not any(task.done() for task in warm), "their adapter is there: they wait for their turn"
    for task in warm:
        task.cancel()


@virtually(1, 2, limits=LIMITS)
async def test_callers_that_leave_wait_no_longer(service: SimulatedService) -> None:
    (ingress,) = service.ingresses
    hang(ingress)
    tasks = [asyncio.create_task(ingress.answer(request(f"a{i}", digest(1)))) for i in range(10)]
    await asyncio.sleep(0.1)
    assert len(ingress.cold._pending._total) == 10
    with pytest.raises(QueueFull):
        await ingress.answer(request("one more", digest(1)))
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)
    assert (len(ingress.cold._pending._total), ingress.cold._pending._groups) == (0, {})


def test_eight_ingresses_do_not_herd() -> None:
    """500 requests a second of two seconds each over 32 replicas: the fullest, on the average, over the mean."""

    async def main() -> float:
        draw, loop = random.Random(0), asyncio.get_running_loop()
        service = SimulatedService(8, ids(32), lambda: draw.expovariate(0.5))
        await service.start()
        worst, tasks, end_s = [], set(), loop.time() + 12.0
        while loop.time() < end_s:
            ingress = draw.choice(service.ingresses)
            task = asyncio.create_task(ingress.answer(request("r")))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if loop.time() > end_s - 6.0:
                running = [service.num_running[each] for each in ids(32)]
                worst.append(max(running) / (sum(running) / 32))
            await asyncio.sleep(draw.expovariate(500.0))
        for task in tasks:
            task.cancel()
        await service.close()
        return sum(worst) / len(worst)

    ratio = run_virtually(main())
    assert 1.0 < ratio <= 1.35, ratio
