"""Room for so many requests at once."""

import asyncio
import gc

import pytest

from agentjobs.contract.problems import ProblemType
from agentjobs.gateway.problems import ProblemError
from agentjobs.gateway.server import Room


def test_who_finds_no_room_is_told_when_to_come_again() -> None:
    room = Room(2, "too much", 5)
    with room.place("a"), room.place("a"):
        with pytest.raises(ProblemError) as caught, room.place("a"):
            pytest.fail("there was room for a third one")
        with room.place("b"):
            pass
    assert caught.value.kind is ProblemType.BUSY
    assert caught.value.headers["Retry-After"] == "5"
    with room.place("a"), room.place("a"):
        pass


async def test_whoever_goes_leaves_the_place_free() -> None:
    room = Room(1, "too much")

    async def stay() -> None:
        with room.place("a"):
            await asyncio.Event().wait()

    staying = asyncio.ensure_future(stay())
    await asyncio.sleep(0)
    staying.cancel()
    await asyncio.gather(staying, return_exceptions=True)
    with pytest.raises(KeyError), room.place("a"):
        raise KeyError
    with room.place("a"):
        pass


def test_nothing_is_kept_of_those_who_were_there_or_refused() -> None:
    room = Room(1, "too much")
    before = refusals()
    for number in range(1000):
        this = f"caller-{number}"
        with room.place(this), pytest.raises(ProblemError), room.place(this):
            pass
    assert not room._taken
    # One that is raised again and again would grow with each raise, and keep all who raised it.
    assert refusals() == before


def refusals() -> int:
    gc.collect()
    return sum(isinstance(each, ProblemError) for each in gc.get_objects())
