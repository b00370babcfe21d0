"""Keys and prices when billing is away."""

from __future__ import annotations

from headrace_common.errors import ReplicaLost
from headrace_testing.gateway_answers import ask, degraded
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually


async def test_known_keys_go_on_unknown_are_refused_politely(fleet: GatewayFleet) -> None:
    """Stale for a bound; a key never seen gets 503, not 401."""
    key, _ = fleet.new_key()

    async def goes_on() -> bool:
        fleet.billing.failure = None
        assert (await ask(fleet)).status_code == 200
        fleet.billing.failure = ReplicaLost("down")
        while not degraded(fleet, "billing"):
            # The news of the new key may come only now, and drops the other from the cache.
            if (await ask(fleet)).status_code != 200:
                return False
        return True

    await eventually(goes_on)
    assert (await ask(fleet, key)).status_code == 503
    assert degraded(fleet, "billing") >= 1
