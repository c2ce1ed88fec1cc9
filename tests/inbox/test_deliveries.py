"""Deliveries: what a signature proves, and what it does not."""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from datetime import timedelta
from http import HTTPStatus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjobs.api.names import EventType, State
from agentjobs.inbox.acceptance import LARGEST_EVENT_BYTES
from agentjobs.inbox.deliveries import Refused, judge
from agentjobs.inbox.heard import Heard
from agentjobs.inbox.signatures import Verifier
from tests.inbox.events import (
    HEARD,
    NOW,
    OTHER,
    SECRET,
    SIGNER,
    body_of,
    headers_of,
    heard,
)

VERIFIER = Verifier([SIGNER.public()["ed25519"]])
BODY = body_of(HEARD)
bounded = settings(max_examples=100, derandomize=True, database=None, deadline=None)


def status_of(headers: Mapping[str, str], body: bytes = BODY, verifier: Verifier = VERIFIER) -> int:
    found = judge(headers, body, verifier, NOW)
    return found.status if isinstance(found, Refused) else 204


def test_r_event_what_the_operator_sends_is_read_whole() -> None:
    assert judge(headers_of(BODY), BODY, VERIFIER, NOW) == HEARD


def test_names_of_headers_come_in_any_case() -> None:
    shouted = {name.upper(): value for name, value in headers_of(BODY).items()}
    assert status_of(shouted) == 204


@pytest.mark.parametrize("seconds", [-299, 0, 299])
def test_r_callback_every_try_is_taken_while_it_is_fresh(seconds: int) -> None:
    assert status_of(headers_of(BODY, at=NOW + timedelta(seconds=seconds))) == 204


@pytest.mark.parametrize("seconds", [-400, 301, 10**9])
def test_r_callback_a_try_of_another_time_is_refused(seconds: int) -> None:
    assert status_of(headers_of(BODY, at=NOW + timedelta(seconds=seconds))) == 401


def test_r_callback_any_of_several_keys_may_have_signed() -> None:
    both = Verifier([SIGNER.public()["ed25519"], OTHER.public()["ed25519"]])
    assert status_of(headers_of(BODY, OTHER), verifier=both) == 204
    assert status_of(headers_of(BODY, OTHER)) == 401
    rotating = headers_of(BODY, OTHER)
    rotating["webhook-signature"] += " " + headers_of(BODY)["webhook-signature"]
    assert status_of(rotating) == 204


def test_r_callback_a_shared_secret_may_sign() -> None:
    headers = headers_of(BODY)
    signed = f"{HEARD.id}.{headers['webhook-timestamp']}.".encode() + BODY
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    headers["webhook-signature"] = f"v1,{signature}"
    assert status_of(headers, verifier=Verifier(secrets=[SECRET])) == 204
    assert status_of(headers) == 401


def test_r_callback_the_published_example_of_standard_webhooks_verifies() -> None:
    verifier = Verifier(secrets=["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])
    content = b'msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330.{"test": 2432232314}'
    signature = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert verifier.signed(signature, content)
    assert not verifier.signed(signature, content + b" ")
    assert not verifier.signed("v1a," + signature[3:], content)


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        pytest.param({"webhook-signature": ""}, 400, id="no signature"),
        pytest.param({"webhook-id": ""}, 400, id="no id"),
        pytest.param({"webhook-id": "a b"}, 400, id="an id with a blank"),
        pytest.param({"webhook-timestamp": "now"}, 400, id="no time"),
        pytest.param({"webhook-timestamp": "1" * 13}, 400, id="a time far away"),
        pytest.param({"webhook-timestamp": "١٢٣"}, 400, id="digits of another script"),
        pytest.param({"webhook-signature": "v1a,AAAA"}, 401, id="a short signature"),
        pytest.param({"webhook-signature": "v1a,*"}, 401, id="no base64"),
        pytest.param({"webhook-signature": "v2," + "A" * 88}, 401, id="another version"),
        pytest.param({"webhook-signature": "v1a"}, 401, id="no value"),
        pytest.param({"webhook-id": "evt_2"}, 401, id="another id"),
    ],
)
def test_a_delivery_that_proves_nothing_is_refused(changed: dict[str, str], status: int) -> None:
    assert status_of(headers_of(BODY) | changed) == status


def test_r_inbox_own_the_headers_of_one_event_fit_no_other() -> None:
    other = body_of(heard(id="evt_2", job_id="b.team-b"))
    assert status_of(headers_of(other), BODY) == 401
    renamed = other.replace(b"b.team-b", b"a.team-a")
    assert status_of(headers_of(other), renamed) == 401


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"subject": "b.team-a"}, id="another subject"),
        pytest.param({"source": "/apis/agentjobs.dev/v1alpha1/x"}, id="another source"),
        pytest.param({"type": "job_cancelled"}, id="a type that does not fit the status"),
        pytest.param({"type": "job_completed_twice"}, id="an unknown type"),
        pytest.param({"time": "2026-03-01T12:00:00"}, id="a time without a zone"),
        pytest.param({"data": {"job_id": "../x"}}, id="no job id"),
        pytest.param({"specversion": "2.0"}, id="another version"),
    ],
)
def test_signed_nonsense_is_no_event(changes: dict[str, object]) -> None:
    body = body_of(HEARD, **changes)
    assert status_of(headers_of(body), body) == 400


@pytest.mark.parametrize("status", [State.INPUT_REQUIRED, State.RUNNING, State.DONE])
@pytest.mark.parametrize("kind", [EventType.INPUT_REQUIRED, EventType.PROGRESS])
def test_r_event_a_question_that_comes_late_is_no_end(status: State, kind: EventType) -> None:
    body = body_of(heard(type=kind, status=status))
    event = judge(headers_of(body), body, VERIFIER, NOW)
    assert isinstance(event, Heard)
    assert not event.over


@pytest.mark.parametrize("status", [State.RUNNING, State.CANCELLED])
def test_r_event_an_end_has_the_status_of_one(status: State) -> None:
    body = body_of(heard(status=status))
    assert status_of(headers_of(body), body) == 400


def test_the_id_of_the_headers_is_that_of_the_event() -> None:
    headers = SIGNER.headers("evt_other", int(NOW.timestamp()), BODY)
    assert status_of(headers) == 400


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 60_000, b"\xff\xfe", b'{"id": NaN}'])
def test_signed_bytes_that_are_no_json_are_no_event(body: bytes) -> None:
    assert status_of(SIGNER.headers(HEARD.id, int(NOW.timestamp()), body), body) == 400


def test_a_body_is_bounded_before_anything_is_computed() -> None:
    assert status_of({}, b"x" * (LARGEST_EVENT_BYTES + 1)) == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


@bounded
@given(st.integers(0, len(BODY) - 1), st.integers(1, 255))
def test_r_callback_no_byte_of_a_body_can_be_changed(place: int, change: int) -> None:
    changed = bytearray(BODY)
    changed[place] ^= change
    assert status_of(headers_of(BODY), bytes(changed)) == 401


@bounded
@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=20), st.text(max_size=60)))
def test_whatever_is_sent_is_judged(body: bytes, headers: dict[str, str]) -> None:
    assert isinstance(judge(headers, body, VERIFIER, NOW), Refused)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Verifier, id="no key"),
        pytest.param(lambda: Verifier(["whpk_AAAA"]), id="a short key"),
        pytest.param(lambda: Verifier([SECRET]), id="a secret as a key"),
        pytest.param(lambda: Verifier(secrets=["whsec_AAAA"]), id="a short secret"),
        pytest.param(
            lambda: Verifier(secrets=[SIGNER.public()["ed25519"]]), id="a public key as a secret"
        ),
    ],
)
def test_what_is_no_key_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"key|secret"):
        make()  # type: ignore[operator]


def test_a_refusal_repeats_nothing_of_what_was_sent() -> None:
    body = json.dumps({"id": "SENT-TEXT", "type": "SENT-TEXT"}).encode()
    found = judge(SIGNER.headers("evt", int(NOW.timestamp()), body), body, VERIFIER, NOW)
    assert isinstance(found, Refused)
    assert "SENT-TEXT" not in found.reason
