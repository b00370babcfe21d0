"""The guard: a verdict on an input, and the open check of a growing output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from headrace_common.errors import ReplicaLost
from headrace_common.proto_wire import Encoded, bytes_tag, with_length
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_common.session_call import SessionCall
from headrace_contracts.guard.v1 import guard_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Guard"]
_INPUT = method_ref(_SERVICE, "CheckInput", pb.CheckInputRequest, pb.CheckInputResponse)
_OUTPUT = method_ref(_SERVICE, "CheckOutput", pb.CheckOutputRequest, pb.CheckOutputResponse)
_MODERATE = method_ref(_SERVICE, "Moderate", pb.ModerateRequest, pb.ModerateResponse)
_OPEN = bytes_tag(pb.CheckOutputRequest.DESCRIPTOR.fields_by_name["open"].number)
_REPORTS = bytes_tag(pb.SentReports.DESCRIPTOR.fields_by_name["reports"].number)
_SENT = method_ref(_SERVICE, "ReportSentMany", pb.SentReports, pb.SentReportResponse)
# What open keys send past a guard is read by nobody: one that only pauses is waited for.
_PATIENCE_S = 1.5
# Between two tries while there is none.
ASK_AGAIN_S = 0.1

InputCall = SessionCall[pb.CheckInputRequest, pb.CheckInputResponse]
OutputCall = SessionCall[pb.CheckOutputRequest, pb.CheckOutputResponse]


class GuardClient:
    """Calls to the guard.

    Args:
        address: of its session.
        timeout_s: longest time to a verdict.
        wait_s: for a guard that is starting again, or frozen.
    """

    def __init__(self, address: str, timeout_s: float, wait_s: float) -> None:
        self._session = SessionClient(address, _PATIENCE_S)
        self._timeout_s, self._wait_s = timeout_s, wait_s

    @property
    def connection(self) -> object | None:
        """What stands for the connection for as long as it lasts; None while there is none."""
        return self._session.connection

    async def start_input_check(self, request: Encoded) -> InputCall:
        """Ask for the verdict on a whole request; it is received from the returned call.

        Raises:
            ReplicaLost: the guard cannot be reached.
        """
        return await self._session.start(_INPUT, request, is_only=True, timeout_s=self._timeout_s)

    async def open_output(self, opened: Encoded, *, waits: bool = False) -> OutputCall:
        """Open the check of one answer.

        Args:
            opened: whose and under which policy.
            waits: for a guard, if there is none now.

        Raises:
            ReplicaLost: the guard cannot be reached.
        """
        first = Encoded(_OPEN + with_length(opened.SerializeToString()))
        give_up_s = time.monotonic() + (self._wait_s if waits else 0.0)
        while True:
            try:
                return await self._session.start(_OUTPUT, first)
            except ReplicaLost:
                if time.monotonic() >= give_up_s:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)

    async def moderate(self, request: pb.ModerateRequest) -> pb.ModerateResponse:
        """Score texts by category.

        Raises:
            HeadraceError: no scores came in time.
        """
        return await self._session.unary(_MODERATE, request, timeout_s=self._timeout_s)

    async def report_sent(self, reports: Sequence[bytes]) -> None:
        """Tell what was sent to clients, each a `SentReport` as it is on the wire.

        Raises:
            HeadraceError: the guard did not take it in time.
        """
        request = Encoded(b"".join([_REPORTS + with_length(it) for it in reports]))
        await self._session.unary(_SENT, request, timeout_s=self._timeout_s)

    async def close(self) -> None:
        """End the connection."""
        await self._session.close()
