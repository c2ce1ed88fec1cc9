"""A certificate that is renewed while it is served."""

import asyncio
import logging
import shutil
import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from agentjobs.gateway import tls
from agentjobs.gateway.tls import Certificate
from tests.cluster.pki import Pki
from tests.until import until


class Files:
    """The files of a certificate, as a mounted Secret has them."""

    def __init__(self, directory: Path) -> None:
        self.certificate, self.key = directory / "tls.crt", directory / "tls.key"
        self._pki = Pki(directory / "pki")
        self._pki.create()
        self._number = 0

    def renew(self, *, key: bool = True) -> int:
        """Write another certificate, and its key if it is not forgotten; return its serial."""
        self._number += 1
        certificate, private = self._pki.server(f"server-{self._number}", ["localhost"])
        shutil.copy(certificate, self.certificate)
        if key:
            shutil.copy(private, self.key)
        return x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def served(context: ssl.SSLContext) -> int:
    """The serial number of the certificate that a new connection gets."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there),
        context.wrap_bio(there, back, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    certificate = ends[0].getpeercert(binary_form=True)
    assert certificate
    return x509.load_der_x509_certificate(certificate).serial_number


def test_new_connections_get_the_new_certificate(files: Files) -> None:
    first = files.renew()
    certificate = Certificate(files.certificate, files.key)
    assert served(certificate.context) == first
    certificate.reload()
    assert served(certificate.context) == first
    second = files.renew()
    certificate.reload()
    assert served(certificate.context) == second


@pytest.mark.parametrize("broken", ["no key to it", "junk", "no file", "half of it"])
def test_what_cannot_be_loaded_changes_nothing_and_is_said_once(
    files: Files, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = files.renew()
    certificate = Certificate(files.certificate, files.key)
    match broken:
        case "no key to it":
            files.renew(key=False)
        case "junk":
            files.certificate.write_text("xyzzy", encoding="utf-8")
        case "no file":
            files.key.unlink()
        case "half of it":
            content = files.certificate.read_bytes()
            files.certificate.write_bytes(content[: len(content) // 2])
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            certificate.reload()
    assert served(certificate.context) == first
    assert len(caplog.records) == 1
    assert str(files.certificate) in caplog.text
    second = files.renew()
    certificate.reload()
    assert served(certificate.context) == second


async def test_the_files_are_looked_at_all_the_time(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHECK_SECONDS", 0.01)
    files.renew()
    certificate = Certificate(files.certificate, files.key)
    following = asyncio.ensure_future(certificate.follow())
    second = files.renew()
    await until(lambda: served(certificate.context) == second)
    following.cancel()


def test_a_key_with_a_password_is_refused_not_asked_for(files: Files) -> None:
    files.renew()
    key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"xyzzy"),
        )
    )
    with pytest.raises(ssl.SSLError):
        Certificate(files.certificate, files.key)


def test_old_versions_of_tls_are_not_spoken(files: Files) -> None:
    files.renew()
    context = Certificate(files.certificate, files.key).context
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_connection_keeps_a_small_buffer(files: Files) -> None:
    files.renew()
    Certificate(files.certificate, files.key)
    # A thousand long polls would be a quarter of a gigabyte otherwise.
    assert SSLProtocol.max_size <= 16 * 1024
