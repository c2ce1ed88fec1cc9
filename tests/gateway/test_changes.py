"""Waiting for a change: everybody is woken who waits for that key, and nobody is kept."""

import asyncio

from agentjobs.gateway.changes import Changes
from tests.until import until

LONG = 60.0


async def waiting(changes: Changes[str], key: str, count: int) -> list[asyncio.Task[None]]:
    """So many who wait, and have begun to."""
    before = len(changes)
    tasks = [asyncio.create_task(changes.wait(key, LONG)) for _ in range(count)]
    await until(lambda: len(changes) == before + count)
    return tasks


async def test_all_who_wait_for_a_key_are_woken_and_nobody_else() -> None:
    changes: Changes[str] = Changes()
    these, others = await waiting(changes, "these", 3), await waiting(changes, "others", 2)
    changes.tell("these")
    await asyncio.gather(*these)
    assert not any(task.done() for task in others)
    assert len(changes) == 2
    changes.tell("others")
    await asyncio.gather(*others)


async def test_who_waits_in_vain_goes_on_after_the_time_and_leaves_nothing_behind() -> None:
    changes: Changes[str] = Changes()
    await changes.wait("key", 0.01)
    await changes.wait("key", 0)
    assert len(changes) == 0
    assert not changes._waiting


async def test_who_hangs_up_leaves_nothing_behind() -> None:
    changes: Changes[str] = Changes()
    first, second = await waiting(changes, "key", 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert len(changes) == 1
    changes.tell("key")
    await second
    assert not changes._waiting


async def test_who_is_told_and_waits_again_at_once_is_not_lost() -> None:
    changes: Changes[str] = Changes()

    async def twice() -> None:
        await changes.wait("key", LONG)
        await changes.wait("key", LONG)

    task = asyncio.create_task(twice())
    for _ in range(2):
        await until(lambda: len(changes))
        changes.tell("key")
    await task
    assert not changes._waiting


async def test_at_the_end_everybody_is_woken_and_nobody_waits_any_more() -> None:
    changes: Changes[str] = Changes()
    tasks = await waiting(changes, "a", 2) + await waiting(changes, "b", 2)
    changes.close()
    await asyncio.gather(*tasks)
    await changes.wait("a", LONG)
