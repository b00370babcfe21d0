"""Pure: virtual token counters, one per tenant.

The tenant served least goes first (VTC: Sheng et al., "Fairness in Serving Large Language
Models", arXiv 2401.00588, algorithm 2). A tenant that comes back after a pause is lifted to the
least counter of those who wait, so that idling saves nothing up. Different here: tenants within
`slack_tokens` of the least count as equal, so that the order by length of work has room.
"""

from __future__ import annotations

from collections.abc import Collection

# Tenants that are remembered; beyond it the ones served least are dropped, which a lift repairs.
_MAX_TENANTS = 10_000


class VirtualCounters:
    """Weighted tokens served per tenant.

    Args:
        output_weight: what one output token counts, in prompt tokens.
        slack_tokens: difference up to which tenants are equal.
    """

    def __init__(self, output_weight: float, slack_tokens: float) -> None:
        self._output_weight, self._slack_tokens = output_weight, slack_tokens
        self._served: dict[str, float] = {}

    def weigh(self, output_weight: float, slack_tokens: float) -> None:
        """Count by other weights from now on."""
        self._output_weight, self._slack_tokens = output_weight, slack_tokens

    def arrive(self, tenant_id: str, waiting: Collection[str]) -> None:
        """A tenant without waiting requests has one now.

        Args:
            tenant_id: who.
            waiting: the other tenants with waiting requests.
        """
        least = min((self._served.get(one, 0.0) for one in waiting), default=0.0)
        self._note(tenant_id, max(self._served.get(tenant_id, 0.0), least))

    def charge(self, tenant_id: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count service given."""
        amount = prompt_tokens + self._output_weight * output_tokens
        self._note(tenant_id, self._served.get(tenant_id, 0.0) + amount)

    def ranks(self, waiting: Collection[str]) -> dict[str, float]:
        """Rank tenants: 0 for all about as little served as the least, else how much more."""
        served = {tenant: self._served.get(tenant, 0.0) for tenant in waiting}
        least = min(served.values(), default=0.0)
        return {
            tenant: 0.0 if amount - least <= self._slack_tokens else amount - least
            for tenant, amount in served.items()
        }

    def _note(self, tenant_id: str, served: float) -> None:
        self._served[tenant_id] = served
        if len(self._served) > _MAX_TENANTS:
            keep = sorted(self._served.items(), key=lambda item: item[1])[_MAX_TENANTS // 2 :]
            self._served = dict(keep)
