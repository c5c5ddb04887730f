from __future__ import annotations

import asyncio

from kvrelay.worker.locks import KeyedLocks


async def test_one_at_a_time_per_name_and_nothing_is_left():
    locks = KeyedLocks()
    log: list[str] = []
    go = asyncio.Event()

    async def hold(name: str, label: str) -> None:
        async with locks.hold(name):
            log.append(label)
            await go.wait()
            log.append(f"{label} ends")

    tasks = [asyncio.create_task(hold(*pair)) for pair in (("a", "a1"), ("a", "a2"), ("b", "b1"))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert log == ["a1", "b1"]
    assert len(locks) == 2
    go.set()
    await asyncio.gather(*tasks)
    assert log.index("a2") > log.index("a1 ends")
    del tasks
    assert len(locks) == 0
