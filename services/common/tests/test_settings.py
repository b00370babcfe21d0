from __future__ import annotations

from typing import ClassVar

import pytest
from pydantic import Field, SecretStr

from headrace_common.settings import (
    OptionalAddress,
    ServiceSettings,
    SettingsError,
    config,
    join_address,
    split_address,
)


class PumpSettings(ServiceSettings):
    prefix: ClassVar[str] = "HEADRACE_PUMP_"
    model_config = config(prefix)
    speed_rpm: int = Field(100, ge=1, le=500, description="Turns per minute.")
    token: SecretStr = Field(SecretStr("x"), description="Secret.")
    store_url: str = Field("", description="Where it notes turns.")
    drain: OptionalAddress = Field("", description="Where the water goes.")


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PUMP_SPEED_RPM", "250")
    assert PumpSettings.load().speed_rpm == 250


def test_a_typo_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PUMP_SPED_RPM", "250")
    with pytest.raises(SettingsError, match=r"HEADRACE_PUMP_SPED_RPM.*HEADRACE_PUMP_SPEED_RPM"):
        PumpSettings.load()


def test_a_wrong_value_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PUMP_SPEED_RPM", "900")
    with pytest.raises(SettingsError, match="HEADRACE_PUMP_SPEED_RPM"):
        PumpSettings.load()


def test_a_mistake_ends_the_process_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_PUMP_SPEED_RPM", "fast")
    with pytest.raises(SystemExit, match="2"):
        PumpSettings.load_or_exit()
    assert "HEADRACE_PUMP_SPEED_RPM" in capsys.readouterr().err


def test_secrets_are_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_PUMP_TOKEN", "very-secret")
    with caplog.at_level("INFO"):
        PumpSettings.load().log_values()
    assert "speed_rpm" in caplog.text
    assert "very-secret" not in caplog.text


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        PumpSettings.load().speed_rpm = 3  # type: ignore[misc]  # that is the point


def test_passwords_in_urls_are_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_PUMP_STORE_URL", "redis://pump:very-secret@10.0.0.1:6379/0")
    with caplog.at_level("INFO"):
        PumpSettings.load().log_values()
    assert "redis://pump:***@10.0.0.1:6379/0" in caplog.text
    assert "very-secret" not in caplog.text


def test_a_port_that_cannot_be_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a failure of the socket, once half of the service has been started."""
    monkeypatch.setenv("HEADRACE_PUMP_DRAIN", "10.0.0.1:65536")
    with pytest.raises(SettingsError, match=r"HEADRACE_PUMP_DRAIN.*65535"):
        PumpSettings.load()
    monkeypatch.setenv("HEADRACE_PUMP_DRAIN", "")
    assert PumpSettings.load().drain == ""


@pytest.mark.parametrize("bad", ["8080", ":8080", "host:port", "host:65536"])
def test_an_address_needs_host_and_port(bad: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        split_address(bad)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("worker.svc:80", ("worker.svc", 80)),
        ("[::]:80", ("::", 80)),
    ],
)
def test_addresses_are_split_and_joined(
    address: str, parts: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPv6 has brackets in an address, and none as a host."""
    assert split_address(address) == parts
    assert join_address(*parts) == address
    monkeypatch.setenv("HEADRACE_PUMP_DRAIN", address)
    assert PumpSettings.load().drain == address


def test_ipv6_without_brackets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say where its port begins."""
    monkeypatch.setenv("HEADRACE_PUMP_DRAIN", "::1:80")
    with pytest.raises(SettingsError, match="HEADRACE_PUMP_DRAIN"):
        PumpSettings.load()
