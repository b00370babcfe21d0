"""Half a minute of the crash test; `bench/ledger_crash.py` runs it for longer."""

import os
from pathlib import Path

import pytest

from headrace_testing.ledger_crash import crash_fleet

pytestmark = [pytest.mark.chaos, pytest.mark.kafka]


@pytest.mark.timeout(300)
async def test_whatever_is_killed_every_request_has_its_one_entry(tmp_path: Path) -> None:
    """Entries = requests that began; balances = an independent recount; a replay is identical."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    async with crash_fleet(tmp_path, environment, seed=7) as fleet:
        report = await fleet.run(30.0)
    assert report.problems == []
    assert report.entries >= len(fleet.begun) > 10
    assert sum(report.kills.values()) >= 4
