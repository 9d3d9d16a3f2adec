"""Hours pass at once, in order."""

from __future__ import annotations

import asyncio
import time

from load_tests.virtual_time import run_virtually


def test_an_hour_takes_no_time_and_its_events_come_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def note(name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> str:
        await asyncio.gather(note("late", 3600.0), note("early", 0.25), note("now", 0.0))
        return "done"

    began_s = time.perf_counter()
    assert run_virtually(main()) == "done"
    assert [name for name, _ in seen] == ["now", "early", "late"]
    assert [round(at_s, 3) for _, at_s in seen] == [0.0, 0.25, 3600.0]
    assert time.perf_counter() - began_s < 600
