"""Signatures of events, and the keys that make them (R-CALLBACK)."""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from agentjobs.inbox.signatures import Verifier
from agentjobs.kube import ConflictError, Kube, NotFoundError, Resource
from agentjobs.signing import MOST_KEYS, SECRET, Signer, load_signer

BODY = b'{"id": "evt_1"}'
NOW = int(datetime.now(UTC).timestamp())
SHARED = "whsec_" + base64.b64encode(b"s" * 24).decode()


def private(byte: int) -> str:
    return "whsk_" + base64.b64encode(bytes([byte]) * 32).decode()


OLD, NEW = private(1), private(2)


def signatures(signer: Signer, event_id: str, at: int, body: bytes) -> list[str]:
    return signer.headers(event_id, at, body)["webhook-signature"].split(" ")


def test_r_callback_the_vectors_of_standard_webhooks() -> None:
    """Those of its reference libraries, version 1.0.0 of the specification."""
    signer = Signer.from_secret(
        {
            "ed25519": "whsk_VEVTVFNJR05JTkdLRVlET05PVFVTRVRISVNGT1JBTlk=",
            "hmac": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        }
    )
    made = signatures(signer, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    ed25519 = (
        "tQ9V2XOqn7jL/DQenEFpqIugdBVtiMmER5mhSkXBNwM0mkATuDe6KYYUuxqtaiHeYGb7KaaBRdM5WqyeFiL8Ag=="
    )
    assert made == [f"v1a,{ed25519}", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="]


def test_r_callback_the_package_standardwebhooks_verifies_our_hmac() -> None:
    headers = Signer.from_secret({"ed25519": OLD, "hmac": SHARED}).headers("evt_1", NOW, BODY)
    assert Webhook(SHARED).verify(BODY, headers) == {"id": "evt_1"}
    with pytest.raises(WebhookVerificationError):
        Webhook(SHARED).verify(BODY + b" ", headers)


def test_r_callback_an_independent_library_verifies_our_ed25519() -> None:
    signer = Signer.from_secret({"ed25519": OLD})
    (made,) = signatures(signer, "evt_1", NOW, BODY)
    key = VerifyKey(base64.b64decode(signer.public()["ed25519"].removeprefix("whpk_")))
    signature = base64.b64decode(made.removeprefix("v1a,"))
    key.verify(f"evt_1.{NOW}.".encode() + BODY, signature)
    with pytest.raises(BadSignatureError):
        key.verify(f"evt_2.{NOW}.".encode() + BODY, signature)


def test_r_callback_while_keys_change_receivers_that_know_either_verify() -> None:
    before = Signer.from_secret({"ed25519": OLD})
    during = Signer.from_secret({"ed25519": OLD, "ed25519-2026-12": NEW})
    after = Signer.from_secret({"ed25519-2026-12": NEW})
    header = during.headers("evt_1", NOW, BODY)["webhook-signature"]
    content = f"evt_1.{NOW}.".encode() + BODY
    assert list(during.public()) == ["ed25519-2026-12", "ed25519"]
    for known in (before, after):
        assert Verifier(known.public().values()).signed(header, content)
    retired = after.headers("evt_1", NOW, BODY)["webhook-signature"]
    assert not Verifier(before.public().values()).signed(retired, content)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({}, "no ed25519 key", id="R-CALLBACK no key"),
        pytest.param({"hmac": SHARED}, "no ed25519 key", id="R-CALLBACK a shared secret alone"),
        pytest.param({"ed25519": "whsk_AAAA"}, "32 bytes", id="R-CALLBACK a short key"),
        pytest.param({"ed25519": SHARED}, "whsk_", id="R-CALLBACK a secret as a key"),
        pytest.param({"ed25519": OLD, "hmac": "whsec_AAAA"}, "24 to 64", id="R-CALLBACK short"),
        pytest.param({"ed25519": OLD, "hmac": OLD}, "whsec_", id="R-CALLBACK a key as a secret"),
        pytest.param({"ed25519": OLD, "ed25519-2": ""}, "ed25519-2", id="R-CALLBACK it is named"),
        pytest.param(
            {f"ed25519-{number}": private(number) for number in range(MOST_KEYS + 1)},
            "more than",
            id="R-CALLBACK too many",
        ),
    ],
)
def test_a_secret_that_holds_something_else(fields: Mapping[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        Signer.from_secret(fields)
    assert not any(value and value in str(raised.value) for value in fields.values())


def test_r_callback_no_key_is_in_a_representation() -> None:
    signer = Signer.from_secret({"ed25519": OLD, "hmac": SHARED})
    assert repr(signer) == "Signer()"


class Store:
    """Secrets and ConfigMaps, and what was written."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.writes = 0

    async def get(self, resource: Resource, _: str, __: str) -> dict[str, Any]:
        if resource.plural not in self.objects:
            raise NotFoundError(404, {}, "GET")
        return self.objects[resource.plural]

    async def create(self, resource: Resource, _: str, body: dict[str, Any]) -> dict[str, Any]:
        if resource.plural in self.objects:
            raise ConflictError(409, {}, "POST")
        self.writes += 1
        self.objects[resource.plural] = body
        return body

    async def patch(self, resource: Resource, *args: Any) -> dict[str, Any]:
        self.writes += 1
        data = self.objects[resource.plural]["data"] | args[2]["data"]
        self.objects[resource.plural]["data"] = {n: v for n, v in data.items() if v is not None}
        return self.objects[resource.plural]

    def put(self, fields: Mapping[str, str]) -> None:
        data = {name: base64.b64encode(value.encode()).decode() for name, value in fields.items()}
        self.objects["secrets"] = {"metadata": {"name": SECRET}, "data": data}

    @property
    def shown(self) -> dict[str, str]:
        data: dict[str, str] = self.objects["configmaps"]["data"]
        return data


async def test_r_callback_a_key_is_made_once_and_its_public_half_shown() -> None:
    store = Store()
    first = await load_signer(cast("Kube", store), "agentjobs-system")
    assert store.shown == first.public()
    again = await load_signer(cast("Kube", store), "agentjobs-system")
    assert (again.public(), store.writes) == (first.public(), 2)


async def test_r_callback_a_new_key_is_shown_and_a_retired_one_no_more() -> None:
    store = Store()
    kube = cast("Kube", store)
    store.put({"ed25519": OLD})
    signer = await load_signer(kube, "agentjobs-system")
    store.put({"ed25519": OLD, "ed25519-2026-12": NEW})
    signer = await load_signer(kube, "agentjobs-system", signer)
    assert sorted(store.shown) == ["ed25519", "ed25519-2026-12"]
    store.put({"ed25519-2026-12": NEW})
    signer = await load_signer(kube, "agentjobs-system", signer)
    assert store.shown == signer.public()
    assert list(store.shown) == ["ed25519-2026-12"]
    written = store.writes
    await load_signer(kube, "agentjobs-system", signer)
    assert store.writes == written
