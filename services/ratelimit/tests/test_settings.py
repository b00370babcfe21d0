"""Tests of the settings."""

from __future__ import annotations

import pytest

from headrace_common.settings import SettingsError
from headrace_ratelimit.settings import RateLimitSettings


def test_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that the launcher sets."""
    monkeypatch.setenv("HEADRACE_RATELIMIT_REDIS_URL", "redis://127.0.0.1:7000/1")
    assert RateLimitSettings.load().redis_url == "redis://127.0.0.1:7000/1"


@pytest.mark.parametrize(
    ("name", "value"),
    [("REDIS_URL", "http://x"), ("NUM_REPLICAS", "0"), ("REDIS_TIMEOUT_S", "0"), ("TYPO", "1")],
)
def test_refuses_what_cannot_work(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A mistake stops the start and is named."""
    monkeypatch.setenv(f"HEADRACE_RATELIMIT_{name}", value)
    with pytest.raises(SettingsError, match=name):
        RateLimitSettings.load()
