"""Settings of the gateway: what cannot be used is refused by its name."""

import pytest

from agentjobs.settings import GatewaySettings, SettingsError

TLS = {"AGENTJOBS_TLS_CERTIFICATE": "/tls/tls.crt", "AGENTJOBS_TLS_KEY": "/tls/tls.key"}


def test_the_defaults_are_those_of_the_class() -> None:
    assert GatewaySettings.from_environment({}) == GatewaySettings()
    assert not GatewaySettings().accept_user_tokens
    assert not GatewaySettings().allow_templates


def test_r_auth_tokens_of_users_are_taken_over_tls_and_by_a_setting() -> None:
    settings = GatewaySettings.from_environment({**TLS, "AGENTJOBS_ACCEPT_USER_TOKENS": "true"})
    assert settings.accept_user_tokens
    assert not GatewaySettings.from_environment(TLS).accept_user_tokens


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        pytest.param({"ACCEPT_USER_TOKENS": "true"}, "ACCEPT_USER_TOKENS", id="users, no TLS"),
        pytest.param({"ACCEPT_USER_TOKENS": "yes"}, "ACCEPT_USER_TOKENS", id="no flag"),
        pytest.param({"TLS_CERTIFICATE": "/tls.crt"}, "TLS_KEY", id="no key"),
        pytest.param({"TLS_KEY": "/tls.key"}, "TLS_CERTIFICATE", id="no certificate"),
        pytest.param({"HTTP_PORT": "http"}, "HTTP_PORT", id="port"),
        pytest.param({"HTTP_PORT": "70000"}, "HTTP_PORT", id="no such port"),
        pytest.param({"DRAIN_SECONDS": "-1"}, "DRAIN_SECONDS", id="negative"),
        pytest.param({"END_SECONDS": "0"}, "END_SECONDS", id="no time to end"),
        pytest.param({"MAX_ARGUMENTS_BYTES": "999999"}, "MAX_ARGUMENTS_BYTES", id="too much"),
        pytest.param({"LOG_LEVEL": "loud"}, "LOG_LEVEL", id="no level"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(
    environment: dict[str, str], names: str
) -> None:
    given = {f"AGENTJOBS_{name}": value for name, value in environment.items()}
    with pytest.raises(SettingsError, match=f"AGENTJOBS_{names}"):
        GatewaySettings.from_environment(given)
