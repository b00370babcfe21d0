from __future__ import annotations

from typing import ClassVar

import pytest
from pydantic import Field, SecretStr

from headrace_common.settings import ServiceSettings, SettingsError, config, split_address


class PumpSettings(ServiceSettings):
    prefix: ClassVar[str] = "HEADRACE_PUMP_"
    model_config = config(prefix)
    speed_rpm: int = Field(100, ge=1, le=500, description="Turns per minute.")
    token: SecretStr = Field(SecretStr("x"), description="Secret.")


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


@pytest.mark.parametrize("bad", ["8080", ":8080", "host:port"])
def test_an_address_needs_host_and_port(bad: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        split_address(bad)
