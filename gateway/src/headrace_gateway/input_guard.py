"""The verdict on an input, under the key's policy for a guard that cannot answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace_common.errors import GuardUnavailable, HeadraceError, InputBlocked
from headrace_contracts.billing.v1.billing_pb2 import Principal
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_gateway.metrics import GatewayMetrics

_MAX_NAMED = 3


class InputChecker(Protocol):
    """What the guard offers here."""

    async def check_input(self, request: pb.CheckInputRequest) -> pb.CheckInputResponse:
        """Judge a whole request."""
        ...


class InputGuard:
    """Asks the guard and does what its verdict says."""

    def __init__(self, guard: InputChecker, metrics: GatewayMetrics) -> None:
        self._guard, self._metrics = guard, metrics

    async def check(
        self,
        principal: Principal,
        request_id: str,
        parts: Sequence[pb.TextPart],
        opaque_paths: Sequence[str] = (),
    ) -> Mapping[int, str]:
        """Judge *parts*; what stands at *opaque_paths* cannot be read by anybody.

        Returns:
            New texts for the parts that must be redacted, by index.

        Raises:
            InputBlocked: something was found that the policy blocks.
            GuardUnavailable: no verdict, and the key is fail-closed.
        """
        request = pb.CheckInputRequest(
            request_id=request_id,
            tenant_id=principal.tenant_id,
            key_id=principal.key_id,
            policy=policy_of(principal),
            parts=parts,
            opaque_paths=opaque_paths,
        )
        try:
            answer = await self._guard.check_input(request)
        except HeadraceError as error:
            self._pass_or_raise(principal, error)
            return {}
        action = answer.verdict.action
        if action == pb.ACTION_BLOCK:
            raise _blocked(answer.verdict, parts)
        if action in (pb.ACTION_UNAVAILABLE, pb.ACTION_UNSPECIFIED):
            self._pass_or_raise(principal, None)
        return dict(answer.redacted_parts)

    def _pass_or_raise(self, principal: Principal, cause: HeadraceError | None) -> None:
        self._metrics.degraded.labels("guard").inc()
        if not principal.guard_fail_open:
            raise GuardUnavailable(
                "The content cannot be judged now.", retry_after_s=1.0
            ) from cause


def policy_of(principal: Principal) -> pb.PolicyRef:
    """Return the key's policy as the guard takes it."""
    return pb.PolicyRef(policy=principal.guard_policy, blocklist=principal.guard_blocklist)


def _blocked(verdict: pb.Verdict, parts: Sequence[pb.TextPart]) -> InputBlocked:
    """Name where and what kind, never the text itself."""
    blocking = [it for it in verdict.findings if it.action == pb.ACTION_BLOCK] or verdict.findings
    where = [
        f"{finding.category} in {parts[finding.part_idx].path}"
        for finding in list(blocking)[:_MAX_NAMED]
        if finding.part_idx < len(parts)
    ]
    first = blocking[0].part_idx if blocking else len(parts)
    return InputBlocked(
        f"The content policy of this key blocks the request: {', '.join(where) or 'content'}.",
        param=parts[first].path if first < len(parts) else None,
    )
