"""A real gateway on a free port, between fakes that speak their whole contracts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_testing.gateway_fleet import GatewayFleet


@pytest.fixture
def fleet_parts(tmp_path: Path) -> GatewayFleet:
    """A fleet that is not started yet."""
    return GatewayFleet(tmp_path)


@pytest.fixture
async def fleet(fleet_parts: GatewayFleet) -> AsyncIterator[GatewayFleet]:
    """A started fleet with one worker."""
    await fleet_parts.start()
    yield fleet_parts
    await fleet_parts.close()


@pytest.fixture
async def fleet_of_two(fleet_parts: GatewayFleet) -> AsyncIterator[GatewayFleet]:
    """A started fleet with two workers."""
    await fleet_parts.start(2)
    yield fleet_parts
    await fleet_parts.close()
