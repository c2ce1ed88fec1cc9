"""Keys and certificates of one cluster, and kubeconfig files made from them."""

import ipaddress
import json
from base64 import b64encode
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = timedelta(days=365)
ADMIN = ("admin", ("system:masters",))


class Pki:
    """A certificate authority in a directory, which signs for servers and for users."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca_file = directory / "ca.crt"
        self.service_account_key = directory / "service-account.key"

    def create(self) -> None:
        """Make the authority and the key that signs service account tokens, anew."""
        self.directory.mkdir(parents=True, exist_ok=True)
        key = _new_key(self.directory / "ca.key")
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "agentjobs-cluster-ca")])
        certificate = (
            _builder(subject, subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(self.ca_file, certificate.public_bytes(serialization.Encoding.PEM))
        _new_key(self.service_account_key)

    def server(self, name: str, hosts: Iterable[str]) -> tuple[Path, Path]:
        """Return certificate and key of a server known by these names and addresses."""
        alternatives = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        return self._sign(name, name, (), ExtendedKeyUsageOID.SERVER_AUTH, alternatives)

    def client(self, user: str, groups: Iterable[str] = ()) -> tuple[Path, Path]:
        """Return certificate and key of a user, as the API server reads them."""
        file = "user-" + "".join(c if c.isalnum() or c in "-." else "-" for c in user)
        # The groups are part of the name, or two kubeconfigs would share one file.
        suffix = "".join(f"+{group.replace(':', '-').replace('/', '-')}" for group in groups)
        return self._sign(file + suffix, user, groups, ExtendedKeyUsageOID.CLIENT_AUTH)

    def kubeconfig(self, file: Path, url: str, user: str, groups: Iterable[str] = ()) -> Path:
        """Write a kubeconfig of `user` that needs no other file, and return its path."""
        certificate, key = self.client(user, tuple(groups))
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "agentjobs",
            "contexts": [{"name": "agentjobs", "context": {"cluster": "agentjobs", "user": user}}],
            "clusters": [
                {
                    "name": "agentjobs",
                    "cluster": {
                        "server": url,
                        "certificate-authority-data": _base64(self.ca_file),
                    },
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": _base64(certificate),
                        "client-key-data": _base64(key),
                    },
                }
            ],
        }
        # JSON is YAML, and every reader of kubeconfig files takes it.
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, (json.dumps(document, indent=2) + "\n").encode(), mode=0o600)
        return file

    @cached_property
    def _authority(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        key = serialization.load_pem_private_key(
            (self.directory / "ca.key").read_bytes(), password=None
        )
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return x509.load_pem_x509_certificate(self.ca_file.read_bytes()), key

    def _sign(
        self,
        name: str,
        common_name: str,
        organizations: Iterable[str],
        purpose: x509.ObjectIdentifier,
        alternatives: x509.SubjectAlternativeName | None = None,
    ) -> tuple[Path, Path]:
        authority, authority_key = self._authority
        certificate_file = self.directory / f"{name}.crt"
        key_file = self.directory / f"{name}.key"
        key = _new_key(key_file)
        names = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, name) for name in organizations]
        subject = x509.Name([*names, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        builder = (
            _builder(subject, authority.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
                critical=False,
            )
        )
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        certificate = builder.sign(authority_key, hashes.SHA256())
        _write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))
        return certificate_file, key_file


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + LIFETIME)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _new_key(file: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    _write(
        file,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        ),
        mode=0o600,
    )
    return key


def _base64(file: Path) -> str:
    return b64encode(file.read_bytes()).decode()


def _write(file: Path, content: bytes, mode: int = 0o644) -> None:
    file.touch(mode=mode)
    file.write_bytes(content)
