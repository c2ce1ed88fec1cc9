"""Keys of the gateway: made once, never doubled, changed only where that does no harm (R-KEY)."""

import base64
import logging
from typing import Any, cast

import pytest

from agentjobs.expiring import Expiring
from agentjobs.gateway.keys import KeyRing, UnusableKeysError, load_keys
from agentjobs.kube import ConflictError, Kube, NotFoundError, UnavailableError

LONG = b"n" * 32
NAMESPACE = "system"


def encoded(**fields: bytes) -> dict[str, str]:
    return {name.replace("_", "-"): base64.b64encode(key).decode() for name, key in fields.items()}


class Secrets:
    """The API server, as far as one Secret goes."""

    def __init__(self, data: dict[str, str] | None = None) -> None:
        self.data = data
        self.version = 1
        self.reads = 0
        self.away = False
        self.lose_race = False

    async def get(self, *_: Any) -> dict[str, Any]:
        self.reads += 1
        if self.away:
            raise UnavailableError("no answer")
        if self.data is None:
            raise NotFoundError(404, {}, "GET")
        return {"metadata": {"resourceVersion": str(self.version)}, "data": dict(self.data)}

    async def create(self, _: Any, __: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.lose_race:
            self.data = encoded(name=b"other" * 8, state=b"other" * 8)
        if self.data is not None:
            raise ConflictError(409, {}, "POST")
        self.data = dict(body["data"])
        return await self.get()

    async def patch(self, _: Any, __: str, ___: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self.data is not None
        if self.lose_race:
            self.data, self.version = encoded(name=b"other" * 8), 2
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise ConflictError(409, {}, "PATCH")
        self.data |= body["data"]
        return await self.get()

    @property
    def kube(self) -> Kube:
        return cast("Kube", self)


async def test_r_key_the_first_start_makes_them_and_the_next_finds_the_same() -> None:
    secrets = Secrets()
    made = await load_keys(secrets.kube, NAMESPACE, jobs_exist=False)
    assert len(made.name) == len(made.state[0]) == 32
    assert made.name != made.state[0]
    assert await load_keys(secrets.kube, NAMESPACE, jobs_exist=True) == made


@pytest.mark.parametrize("there", [None, {}], ids=["no Secret", "an emptied one"])
async def test_r_key_of_two_first_starts_the_later_one_takes_the_keys_of_the_other(
    there: dict[str, str] | None,
) -> None:
    secrets = Secrets(there)
    secrets.lose_race = True
    found = await load_keys(secrets.kube, NAMESPACE, jobs_exist=False)
    assert found.name == b"other" * 8


async def test_r_key_what_is_there_is_kept_when_the_rest_is_made() -> None:
    secrets = Secrets(encoded(state=b"s" * 32))
    made = await load_keys(secrets.kube, NAMESPACE, jobs_exist=False)
    assert made.state == (b"s" * 32,)


@pytest.mark.parametrize("there", [None, {}, encoded(state=LONG)], ids=["none", "empty", "state"])
async def test_r_key_no_name_key_is_made_while_jobs_named_by_one_exist(
    there: dict[str, str] | None,
) -> None:
    secrets = Secrets(there)
    with pytest.raises(UnusableKeysError, match=r"Secret system/agentjobs-gateway-keys.*Restore"):
        await load_keys(secrets.kube, NAMESPACE, jobs_exist=True)
    assert secrets.data == there


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(encoded(name=b"short", state=LONG), "field name has 5 bytes", id="name"),
        pytest.param(encoded(name=LONG, state=b"short"), "field state has 5 bytes", id="state"),
        pytest.param(
            encoded(name=LONG, state=LONG, state_previous=b"s"),
            "field state-previous has 1 bytes",
            id="previous",
        ),
        pytest.param({"name": "%%%"}, "field name is not base64", id="no base64"),
        pytest.param({"name": "é"}, "field name is not base64", id="no ASCII"),
    ],
)
async def test_r_key_what_is_no_key_is_said(data: dict[str, str], says: str) -> None:
    with pytest.raises(UnusableKeysError, match=says) as caught:
        await load_keys(Secrets(data).kube, NAMESPACE, jobs_exist=False)
    assert "%%%" not in str(caught.value), "no key is ever said"


async def test_without_a_state_key_all_replicas_derive_the_same_one() -> None:
    data = encoded(name=LONG)
    first, second = [
        await load_keys(Secrets(data).kube, NAMESPACE, jobs_exist=True) for _ in range(2)
    ]
    assert first == second
    assert LONG not in first.state


def test_keys_are_in_no_representation() -> None:
    from agentjobs.gateway.keys import Keys  # noqa: PLC0415 - for this one

    assert repr(Keys(LONG, (LONG,))) == "Keys()"


# --- while the process runs


class Ring:
    """A key ring that was loaded, and the Secret behind it; answers are remembered or not."""

    def __init__(self, seconds: float) -> None:
        self.secrets = Secrets(encoded(name=LONG, state=b"1" * 32))
        self.ring = KeyRing(self.secrets.kube, NAMESPACE)
        self.ring._latest = Expiring(lambda _: seconds, 1)

    async def load(self) -> "Ring":
        await self.ring.load(jobs_exist=False)
        return self


async def test_a_changed_state_key_is_taken_in() -> None:
    this = await Ring(0).load()
    assert not await this.ring.refresh()
    this.secrets.data = encoded(name=LONG, state=b"2" * 32, state_previous=b"1" * 32)
    assert await this.ring.refresh()
    assert this.ring.keys
    assert this.ring.keys.state == (b"2" * 32, b"1" * 32)


async def test_it_is_read_again_every_few_seconds_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    this = await Ring(60).load()
    this.secrets.data = None
    before = this.secrets.reads
    for _ in range(100):
        assert not await this.ring.refresh()
    assert this.secrets.reads == before + 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(encoded(name=b"m" * 32, state=b"2" * 32), "restore it", id="another name"),
        pytest.param(encoded(state=b"2" * 32), "restore it", id="no name"),
        pytest.param(encoded(name=LONG, state=b"2"), "field state has 1 bytes", id="no key"),
        pytest.param(None, "cannot be read again", id="deleted"),
    ],
)
async def test_r_key_the_name_key_of_a_running_process_never_changes(
    data: dict[str, str] | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    this = await Ring(0).load()
    before = this.ring.keys
    this.secrets.data = data
    with caplog.at_level(logging.WARNING):
        assert not await this.ring.refresh()
    assert this.ring.keys == before
    assert says in caplog.text


async def test_an_api_server_that_is_away_leaves_the_keys_as_they_are() -> None:
    this = await Ring(0).load()
    before = this.ring.keys
    this.secrets.away = True
    assert not await this.ring.refresh()
    assert this.ring.keys == before
