"""The policies in force: read again when they change, without touching what is under way."""

from __future__ import annotations

import asyncio
import logging

from headrace_common.errors import InvalidRequest, NotFound
from headrace_guard.metrics import GuardMetrics
from headrace_guard.plan import Planner, plans_of
from headrace_guard.policy import DEFAULT_POLICY, Policy, PolicyError
from headrace_guard.policy_store import Policies, PolicyStore

_log = logging.getLogger(__name__)


class PolicyBook:
    """Belongs to one event loop.

    Args:
        store: where policies come from.
        policies: what was read from it at the start.
        planner: gets every change.
        metrics: counts readings.
    """

    def __init__(
        self, store: PolicyStore, policies: Policies, planner: Planner, metrics: GuardMetrics
    ) -> None:
        self._store, self._planner, self._metrics = store, planner, metrics
        self.policies = policies
        self._changing = asyncio.Lock()

    def get(self, name: str) -> Policy:
        """Return a policy.

        Raises:
            NotFound: there is none of this name.
        """
        policy = self.policies.by_name.get(name or DEFAULT_POLICY)
        if policy is None:
            raise NotFound(f"There is no policy {name!r}.")
        return policy

    async def put(self, name: str, text: str, if_version: str) -> Policy:
        """Check, keep and apply one policy.

        Raises:
            InvalidRequest: it is wrong.
            StaleVersion: another version than *if_version* is in force.
        """
        async with self._changing:
            await asyncio.to_thread(self._store.put, name, text, if_version)
            await self._load()
        return self.get(name)

    async def delete(self, name: str) -> None:
        """Drop a put policy.

        Raises:
            NotFound: none of this name was put.
        """
        async with self._changing:
            await asyncio.to_thread(self._store.delete, name)
            await self._load()

    async def reload(self) -> None:
        """Read everything again.

        Raises:
            InvalidRequest: something is wrong; what was in force stays.
        """
        async with self._changing:
            await self._load()

    async def keep(self, every_s: float) -> None:
        """Read everything again whenever a file changes, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            if await asyncio.to_thread(self._store.has_changed):
                try:
                    await self.reload()
                except InvalidRequest as error:
                    # One line, as it is searched for by what it says.
                    reason = str(error).replace("\n", "; ")
                    _log.error("policies stay as they were: %s", reason)

    async def _load(self) -> None:
        try:
            policies = await asyncio.to_thread(self._store.load)
        except PolicyError as error:
            self._metrics.policy_reloads.labels("refused").inc()
            raise InvalidRequest(str(error)) from error
        plans = await asyncio.to_thread(plans_of, policies.by_name)
        self._planner.use(plans)
        self.policies = policies
        self._metrics.policy_reloads.labels("applied").inc()
        _log.info("policies in force: %s", sorted(one.version for one in policies.by_name.values()))
