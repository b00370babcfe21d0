"""Settings and the command line."""

import sys
from pathlib import Path

import pytest

from headrace_common.settings import SettingsError
from headrace_router.__main__ import main
from headrace_router.settings import RouterSettings


def test_workers_are_a_list() -> None:
    """Blanks and empty entries do not matter."""
    settings = RouterSettings(workers="127.0.0.1:1, dns:workers:7100,,")
    assert settings.worker_entries() == ["127.0.0.1:1", "dns:workers:7100"]


@pytest.mark.parametrize("workers", ["nohost", "host:port", "dns:name"])
def test_malformed_workers_stop_the_start(monkeypatch, workers: str) -> None:
    """A typo is told, not tried for ever."""
    monkeypatch.setenv("HEADRACE_ROUTER_WORKERS", workers)
    with pytest.raises(SettingsError, match="WORKERS"):
        RouterSettings.load()


def test_unknown_settings_stop_the_start(monkeypatch) -> None:
    """So does a misspelt name."""
    monkeypatch.setenv("HEADRACE_ROUTER_WORKRES", "127.0.0.1:1")
    with pytest.raises(SettingsError, match="WORKRES"):
        RouterSettings.load()


def test_check_config_tells_good_from_bad(monkeypatch, capsys, tmp_path: Path) -> None:
    """The exit code and the message say it."""
    good = tmp_path / "good.toml"
    good.write_text("version = 1\n")
    monkeypatch.setattr(sys, "argv", ["headrace-router", "--check-config", str(good)])
    # A file is checked where nothing else is set up, or is set up wrongly.
    monkeypatch.setenv("HEADRACE_ROUTER_WORKERS", "nohost")
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "policy hold" in capsys.readouterr().out
    good.write_text("version = 7\n")
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "version" in capsys.readouterr().err
