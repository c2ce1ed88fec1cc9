"""Answers that hold for some seconds: asked for once, and never older than they may be."""

import asyncio

import pytest

from agentjobs.expiring import Expiring


class Oracle:
    """Answers with the number of the question, when it is let."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.breaks = False

    async def ask(self) -> int:
        self.asked += 1
        number = self.asked
        await self.may_answer.wait()
        if self.breaks:
            raise RuntimeError("it broke")
        return number


class Clock:
    """The loop's time, which goes on only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
async def oracle() -> Oracle:
    return Oracle()


def answers(size: int = 10) -> Expiring[str, int]:
    return Expiring(lambda _: 10.0, size)


async def test_r_auth_an_answer_holds_for_its_time_and_is_asked_for_again(
    clock: Clock, oracle: Oracle
) -> None:
    kept = answers()
    assert await kept.get("k", oracle.ask) == 1
    clock.now += 9.9
    assert await kept.get("k", oracle.ask) == 1
    clock.now += 0.2
    assert await kept.get("k", oracle.ask) == 2


async def test_r_auth_an_answer_is_as_old_as_its_question(clock: Clock, oracle: Oracle) -> None:
    kept = answers()
    oracle.may_answer.clear()
    asking = asyncio.ensure_future(kept.get("k", oracle.ask))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    clock.now += 9.9  # the API server took so long
    oracle.may_answer.set()
    assert await asking == 1
    clock.now += 0.2
    assert await kept.get("k", oracle.ask) == 2


async def test_who_asks_while_it_is_asked_gets_the_same_answer(oracle: Oracle) -> None:
    kept = answers()
    oracle.may_answer.clear()
    asking = [asyncio.ensure_future(kept.get("k", oracle.ask)) for _ in range(100)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    oracle.may_answer.set()
    assert set(await asyncio.gather(*asking)) == {1}
    assert oracle.asked == 1


async def test_who_hangs_up_does_not_take_the_answer_from_the_others(oracle: Oracle) -> None:
    kept = answers()
    oracle.may_answer.clear()
    first, second = (asyncio.ensure_future(kept.get("k", oracle.ask)) for _ in range(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    oracle.may_answer.set()
    assert await second == 1


async def test_a_failure_is_told_to_all_who_asked_and_not_kept(oracle: Oracle) -> None:
    kept = answers()
    oracle.breaks = True
    results = await asyncio.gather(
        *(kept.get("k", oracle.ask) for _ in range(3)), return_exceptions=True
    )
    assert {type(result) for result in results} == {RuntimeError}
    assert oracle.asked == 1
    oracle.breaks = False
    assert await kept.get("k", oracle.ask) == 2


async def test_the_oldest_answers_go_first_when_there_are_too_many(oracle: Oracle) -> None:
    kept = answers(size=2)
    for key in ("a", "b", "c"):
        await kept.get(key, oracle.ask)
    assert await kept.get("b", oracle.ask) == 2
    assert await kept.get("c", oracle.ask) == 3
    assert await kept.get("a", oracle.ask) == 4
