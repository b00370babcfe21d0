"""Which guard policies there are: a key that names another one is refused."""

from __future__ import annotations

from headrace_common.errors import HeadraceError, InvalidRequest, Unavailable
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.guard.v1 import guard_pb2 as pb

_LIST = method_ref(
    pb.DESCRIPTOR.services_by_name["GuardAdmin"],
    "ListPolicies",
    pb.ListPoliciesRequest,
    pb.ListPoliciesResponse,
)
_TIMEOUT_S = 5.0


class PolicyNames:
    """Asks the guard.

    Args:
        guard_address: host:port; empty = nobody to ask, every name is taken.
    """

    def __init__(self, guard_address: str) -> None:
        self._session = SessionClient(guard_address) if guard_address else None

    async def check(self, policy: str) -> None:
        """Raise unless there is such a policy. Empty is the default one.

        Raises:
            InvalidRequest: there is none.
            Unavailable: the guard cannot be asked.
        """
        if not policy or self._session is None:
            return
        try:
            answer = await self._session.unary(
                _LIST, pb.ListPoliciesRequest(), timeout_s=_TIMEOUT_S
            )
        except HeadraceError as error:
            raise Unavailable(
                "The guard cannot be asked which policies there are.", retry_after_s=1.0
            ) from error
        names = sorted(it.name for it in answer.policies)
        if policy not in names:
            raise InvalidRequest(
                f"There is no guard policy {policy!r}; there are {', '.join(names)}.",
                param="key.guard_policy",
            )

    async def close(self) -> None:
        """End the connection."""
        if self._session is not None:
            await self._session.close()
