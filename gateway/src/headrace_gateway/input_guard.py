"""The verdict on an input, under the key's policy for a guard that cannot answer.

A guard that starts again, or is frozen, is no reason to refuse: whoever cannot do without it asks
again, within a bound. A question that two guards did not survive is not asked a third time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace_common.errors import GuardUnavailable, HeadraceError, InputBlocked, ReplicaLost
from headrace_common.proto_wire import Encoded, bytes_tag, with_length
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_gateway.api_request import GuardPart
from headrace_gateway.clients.guard import ASK_AGAIN_S, InputCall
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.principal import Principal

_MAX_NAMED = 3
_FIELDS = pb.CheckInputRequest.DESCRIPTOR.fields_by_name
_REQUEST_ID, _PARTS = (bytes_tag(_FIELDS[it].number) for it in ("request_id", "parts"))


class InputChecker(Protocol):
    """What the guard offers here."""

    async def start_input_check(self, request: Encoded) -> InputCall:
        """Ask for the verdict on a whole request."""
        ...


class PendingVerdict:
    """A question on its way: `ask` it; `result` may be awaited once, else `cancel` it."""

    def __init__(
        self,
        guard: InputChecker,
        request: Encoded,
        principal: Principal,
        parts: Sequence[GuardPart],
        metrics: GatewayMetrics,
        longest_wait_s: float,
    ) -> None:
        self._guard, self._request, self._principal = guard, request, principal
        self._parts, self._metrics = parts, metrics
        self._started_s = time.monotonic()
        self._give_up_s = self._started_s + longest_wait_s
        self._asked: InputCall | HeadraceError = ReplicaLost("The guard was not asked.")

    async def ask(self) -> None:
        """Send the question; what is wrong with the way there is told by `result`."""
        try:
            self._asked = await self._guard.start_input_check(self._request)
        except HeadraceError as error:
            self._asked = error

    @property
    def elapsed_s(self) -> float:
        """From the question to its answer, or until now."""
        answered_s = None
        if not isinstance(self._asked, HeadraceError):
            answered_s = self._asked.first_answer_s
        return (answered_s or time.monotonic()) - self._started_s

    async def result(self) -> Mapping[int, str]:
        """Wait for the verdict.

        Returns:
            New texts for the parts that must be redacted, by index.

        Raises:
            InputBlocked: something was found that the policy blocks.
            GuardUnavailable: no verdict, and the key is fail-closed.
        """
        try:
            answer = await self._answer()
        except HeadraceError as error:
            self._pass_or_raise(error)
            return {}
        action = answer.verdict.action
        if action == pb.ACTION_BLOCK:
            raise _blocked(answer.verdict, self._parts)
        if action in (pb.ACTION_UNAVAILABLE, pb.ACTION_UNSPECIFIED):
            self._pass_or_raise(None, answer.verdict.reason)
        # Mostly empty, and to copy one of protobuf's takes some Python all the same.
        redacted = answer.redacted_parts
        return dict(redacted) if redacted else {}

    def cancel(self) -> None:
        """Nobody wants the answer any more; nothing happens if it is there."""
        if not isinstance(self._asked, HeadraceError):
            self._asked.cancel()

    async def _answer(self) -> pb.CheckInputResponse:
        num_cut = 0
        while True:
            is_cut = not isinstance(self._asked, HeadraceError)
            try:
                return await self._receive()
            except ReplicaLost:
                num_cut += is_cut
                is_late = time.monotonic() >= self._give_up_s
                if self._principal.guard_fail_open or num_cut > 1 or is_late:
                    raise
            if not is_cut:
                await asyncio.sleep(ASK_AGAIN_S)
            await self.ask()

    async def _receive(self) -> pb.CheckInputResponse:
        if isinstance(self._asked, HeadraceError):
            raise self._asked
        answer = await self._asked.receive()
        if answer is None:
            raise ReplicaLost("The guard gave no verdict.")
        return answer

    def _pass_or_raise(self, cause: HeadraceError | None, why: str = "") -> None:
        # That the guard could not judge is an answer; it counts those itself.
        if cause is not None:
            self._metrics.degraded.labels("guard").inc()
        if not self._principal.guard_fail_open:
            message = f"The content cannot be judged now{f': {why}' if why else ''}."
            raise GuardUnavailable(message, retry_after_s=1.0) from cause


class InputGuard:
    """Asks the guard; the verdict is taken when it is needed.

    Args:
        guard: judges.
        metrics: inputs that go unjudged are counted.
        longest_wait_s: for a guard that starts again, or is frozen.
    """

    def __init__(self, guard: InputChecker, metrics: GatewayMetrics, longest_wait_s: float) -> None:
        self._guard, self._metrics, self._longest_wait_s = guard, metrics, longest_wait_s

    async def ask(
        self,
        principal: Principal,
        request_id: str,
        parts: Sequence[GuardPart],
        opaque_paths: Sequence[str] = (),
    ) -> PendingVerdict:
        """Send *parts* to be judged; what stands at *opaque_paths* cannot be read by anybody."""
        pieces = [_REQUEST_ID, with_length(request_id.encode()), principal.guard_head]
        for part in parts:
            encoded = pb.TextPart(path=part.path, trust=part.trust, text=part.text)
            pieces += (_PARTS, with_length(encoded.SerializeToString()))
        if opaque_paths:
            pieces.append(pb.CheckInputRequest(opaque_paths=opaque_paths).SerializeToString())
        request = Encoded(b"".join(pieces))
        pending = PendingVerdict(
            self._guard, request, principal, parts, self._metrics, self._longest_wait_s
        )
        await pending.ask()
        return pending


def _blocked(verdict: pb.Verdict, parts: Sequence[GuardPart]) -> InputBlocked:
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
