"""Settings of operator and gateway; the only reader of environment names."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from agentjobs.api.names import MAX_REPORTED_BYTES

PREFIX = "AGENTJOBS_"
MAX_PORT = 2**16 - 1


class SettingsError(Exception):
    """A setting has a value that cannot be used; the message names it."""


@dataclass(frozen=True)
class Settings:
    """Durations in seconds, sizes in bytes."""

    namespace: str = "agentjobs-system"
    """Where the Lease lives."""
    identity: str = ""
    """Name of this process in the Lease."""
    lease_name: str = "agentjobs-operator"
    lease_seconds: int = 10
    lease_renew_seconds: int = 7
    lease_retry_seconds: int = 2
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces to serve; none: all."""
    listen: str = "0.0.0.0"  # noqa: S104 - a pod serves its probes and metrics on its address
    port: int = 9090
    workers: int = 16
    """Passes that may be under way at once."""
    relist_seconds: int = 300
    """How often everything is listed, to repair what watches missed."""
    log_level: str = "info"
    log_format: str = "json"
    default_deadline_seconds: int = 3600
    default_ttl_seconds: int = 86400
    max_arguments_bytes: int = 16 * 1024
    grace_ceiling_seconds: int = 120
    node_lost_seconds: int = 300
    linger_seconds: int = 30
    gateway_url: str = ""
    """Where agents read results; part of events."""
    output_store: str = ""
    """URL of the store that output is kept in; empty: none is kept."""
    log_patience_seconds: int = 60
    """How long a log that cannot be read is asked for after its container has ended."""
    pod_retention_seconds: int = 600
    """How long pods stay after their output is archived."""
    store_patience_seconds: int = 60
    """How long a store that fails is waited for, before it is said that output is missing, and
    before an AgentJob is deleted though its output cannot be."""
    callbacks_allow: str = ""
    """Where events may be sent: a JSON list of {namespaces, hosts, cidrs, ports}. None: nowhere."""
    callbacks_deny: tuple[str, ...] = ()
    """Networks that no event may be sent to, whatever is allowed."""
    callbacks_insecure_loopback: bool = False
    """Events may go to loopback addresses. For tests on one machine only."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read AGENTJOBS_* variables.

        :raises SettingsError: a value is no number, or no choice that exists.
        """
        get = _Reader(environment)
        return cls(
            namespace=get.text("NAMESPACE", cls.namespace),
            identity=get.text("IDENTITY", socket.gethostname()),
            lease_name=get.text("LEASE_NAME", cls.lease_name),
            lease_seconds=get.number("LEASE_SECONDS", cls.lease_seconds),
            lease_renew_seconds=get.number("LEASE_RENEW_SECONDS", cls.lease_renew_seconds),
            lease_retry_seconds=get.number("LEASE_RETRY_SECONDS", cls.lease_retry_seconds),
            watch_namespaces=tuple(get.text("WATCH_NAMESPACES", "").replace(",", " ").split()),
            listen=get.text("LISTEN", cls.listen),
            port=get.number("PORT", cls.port, least=0, most=MAX_PORT),
            workers=get.number("WORKERS", cls.workers),
            relist_seconds=get.number("RELIST_SECONDS", cls.relist_seconds),
            log_level=get.choice("LOG_LEVEL", ("debug", "info", "warning", "error"), "info"),
            log_format=get.choice("LOG_FORMAT", ("json", "text"), "json"),
            default_deadline_seconds=get.number(
                "DEFAULT_DEADLINE_SECONDS", cls.default_deadline_seconds
            ),
            default_ttl_seconds=get.number("DEFAULT_TTL_SECONDS", cls.default_ttl_seconds, least=0),
            max_arguments_bytes=get.number(
                "MAX_ARGUMENTS_BYTES", cls.max_arguments_bytes, most=64 * 1024
            ),
            grace_ceiling_seconds=get.number("GRACE_CEILING_SECONDS", cls.grace_ceiling_seconds),
            node_lost_seconds=get.number("NODE_LOST_SECONDS", cls.node_lost_seconds),
            gateway_url=get.text("GATEWAY_URL", ""),
            output_store=get.text("OUTPUT_STORE", ""),
            log_patience_seconds=get.number("LOG_PATIENCE_SECONDS", cls.log_patience_seconds),
            store_patience_seconds=get.number("STORE_PATIENCE_SECONDS", cls.store_patience_seconds),
            pod_retention_seconds=get.number(
                "POD_RETENTION_SECONDS", cls.pod_retention_seconds, least=0
            ),
            callbacks_allow=get.text("CALLBACKS_ALLOW", ""),
            callbacks_deny=tuple(get.text("CALLBACKS_DENY", "").replace(",", " ").split()),
            callbacks_insecure_loopback=get.flag("CALLBACKS_INSECURE_LOOPBACK"),
            linger_seconds=get.number("LINGER_SECONDS", cls.linger_seconds),
        )


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of the gateway. Durations in seconds, sizes in bytes."""

    namespace: str = "agentjobs-system"
    """Where its Secret lives; nothing is run there."""
    listen: str = "0.0.0.0"  # noqa: S104 - a pod serves on its address
    port: int = 8080
    """Of the HTTP API."""
    mcp: bool = True
    """Whether MCP is served."""
    mcp_port: int = 8081
    mcp_plain_tools: bool = True
    """Whether there are tools for MCP clients that know no tasks."""
    mcp_sync_seconds: int = 25
    """How long such a client waits for the end of a tool before it is given the job's id."""
    mcp_allowed_origins: frozenset[str] = frozenset()
    """Origins of web pages that may call over MCP, such as https://agents.example.com."""
    tls_certificate: str = ""
    """File of the certificate chain; empty: plain HTTP."""
    tls_key: str = ""
    accept_user_tokens: bool = False
    """Tokens of the API server's own audience are taken, over TLS."""
    allow_templates: bool = False
    drain_seconds: int = 5
    """How long it goes on serving after it was asked to end, until no one is sent to it."""
    end_seconds: int = 20
    """How long what is under way may take then."""
    log_level: str = "info"
    log_format: str = "json"
    default_deadline_seconds: int = 3600
    default_ttl_seconds: int = 86400
    max_arguments_bytes: int = 16 * 1024
    output_store: str = ""
    """URL of the store that output is kept in; empty: there is none to show."""
    max_reported_output_bytes: int = 64 * 1024 * 1024
    """What the pods of one job may hand in as output, beside what they print."""
    callbacks_allow: str = ""
    callbacks_deny: tuple[str, ...] = ()
    """Networks that no event may be sent to, whatever is allowed."""
    callbacks_insecure_loopback: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read AGENTJOBS_* variables.

        :raises SettingsError: a value is no number, or no choice that exists.
        """
        get = _Reader(environment)
        certificate, key = get.text("TLS_CERTIFICATE", ""), get.text("TLS_KEY", "")
        if bool(certificate) != bool(key):
            raise SettingsError(
                f"{PREFIX}TLS_CERTIFICATE and {PREFIX}TLS_KEY: both are needed, or none"
            )
        users = get.flag("ACCEPT_USER_TOKENS")
        if users and not certificate:
            raise SettingsError(
                f"{PREFIX}ACCEPT_USER_TOKENS=true: users' tokens are taken over TLS only; "
                f"set {PREFIX}TLS_CERTIFICATE and {PREFIX}TLS_KEY"
            )
        return cls(
            namespace=get.text("NAMESPACE", cls.namespace),
            listen=get.text("LISTEN", cls.listen),
            port=get.number("HTTP_PORT", cls.port, least=0, most=MAX_PORT),
            mcp=get.flag("MCP", default=True),
            mcp_port=get.number("MCP_PORT", cls.mcp_port, least=0, most=MAX_PORT),
            mcp_plain_tools=get.flag("MCP_PLAIN_TOOLS", default=True),
            mcp_sync_seconds=get.number("MCP_SYNC_SECONDS", cls.mcp_sync_seconds, least=0),
            mcp_allowed_origins=frozenset(
                get.text("MCP_ALLOWED_ORIGINS", "").replace(",", " ").split()
            ),
            tls_certificate=certificate,
            tls_key=key,
            accept_user_tokens=users,
            allow_templates=get.flag("ALLOW_TEMPLATES"),
            drain_seconds=get.number("DRAIN_SECONDS", cls.drain_seconds, least=0),
            end_seconds=get.number("END_SECONDS", cls.end_seconds),
            log_level=get.choice("LOG_LEVEL", ("debug", "info", "warning", "error"), "info"),
            log_format=get.choice("LOG_FORMAT", ("json", "text"), "json"),
            default_deadline_seconds=get.number(
                "DEFAULT_DEADLINE_SECONDS", cls.default_deadline_seconds
            ),
            default_ttl_seconds=get.number("DEFAULT_TTL_SECONDS", cls.default_ttl_seconds, least=0),
            max_arguments_bytes=get.number(
                "MAX_ARGUMENTS_BYTES", cls.max_arguments_bytes, most=64 * 1024
            ),
            output_store=get.text("OUTPUT_STORE", ""),
            max_reported_output_bytes=get.number(
                "MAX_REPORTED_OUTPUT_BYTES",
                cls.max_reported_output_bytes,
                least=0,
                most=MAX_REPORTED_BYTES,
            ),
            callbacks_allow=get.text("CALLBACKS_ALLOW", ""),
            callbacks_deny=tuple(get.text("CALLBACKS_DENY", "").replace(",", " ").split()),
            callbacks_insecure_loopback=get.flag("CALLBACKS_INSECURE_LOOPBACK"),
        )


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str, default: str) -> str:
        return self._environment.get(PREFIX + name, "") or default

    def number(self, name: str, default: int, *, least: int = 1, most: int = 2**31) -> int:
        raw = self.text(name, str(default))
        try:
            value = int(raw)
        except ValueError:
            raise SettingsError(f"{PREFIX}{name}={raw!r}: a whole number is required") from None
        if not least <= value <= most:
            raise SettingsError(f"{PREFIX}{name}={value}: must be between {least} and {most}")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self.text(name, default).lower()
        if value not in choices:
            raise SettingsError(f"{PREFIX}{name}={value!r}: must be one of {', '.join(choices)}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"
