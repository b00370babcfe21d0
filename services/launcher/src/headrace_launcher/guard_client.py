"""The commands' way to the guard: plain calls, one channel per command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from headrace_common import rpc
from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_launcher.peer import PeerError, Req, Res, ask
from headrace_launcher.text import say

_ADMIN = pb.DESCRIPTOR.services_by_name["GuardAdmin"]
_LIST = rpc.method_ref(_ADMIN, "ListPolicies", pb.ListPoliciesRequest, pb.ListPoliciesResponse)
_GET = rpc.method_ref(_ADMIN, "GetPolicy", pb.GetPolicyRequest, pb.PolicyDocument)
_PUT = rpc.method_ref(_ADMIN, "PutPolicy", pb.PutPolicyRequest, pb.PolicyDocument)
_DELETE = rpc.method_ref(_ADMIN, "DeletePolicy", pb.DeletePolicyRequest, pb.ListPoliciesResponse)
_RELOAD = rpc.method_ref(
    _ADMIN, "ReloadPolicies", pb.ReloadPoliciesRequest, pb.ListPoliciesResponse
)
_FIND = rpc.method_ref(_ADMIN, "FindAudit", pb.FindAuditRequest, pb.FindAuditResponse)
_VERIFY = rpc.method_ref(_ADMIN, "VerifyAudit", pb.VerifyAuditRequest, pb.VerifyAuditResponse)

_TIMEOUT_S = 15.0
_VERIFY_TIMEOUT_S = 600.0  # recounts every record
_CHECK_TIMEOUT_S = 3.0


class GuardClient:
    """The guard's admin service. Every method raises `PeerError`."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._channel, self._peer = channel, f"guard at {address}"

    async def policies(self, timeout_s: float = _TIMEOUT_S) -> list[pb.PolicyInfo]:
        """List the policies in force."""
        answer = await self._call(_LIST, pb.ListPoliciesRequest(), timeout_s)
        return list(answer.policies)

    async def policy(self, name: str) -> pb.PolicyDocument:
        """Return one policy."""
        return await self._call(_GET, pb.GetPolicyRequest(name=name))

    async def put(self, name: str, toml: str, if_version: str) -> pb.PolicyDocument:
        """Put one policy in force."""
        request = pb.PutPolicyRequest(name=name, toml=toml, if_version=if_version)
        return await self._call(_PUT, request)

    async def delete(self, name: str) -> list[pb.PolicyInfo]:
        """Drop a policy that was put."""
        answer = await self._call(_DELETE, pb.DeletePolicyRequest(name=name))
        return list(answer.policies)

    async def reload(self) -> list[pb.PolicyInfo]:
        """Let the guard read its files again."""
        return list((await self._call(_RELOAD, pb.ReloadPoliciesRequest())).policies)

    async def audit(self, request_id: str) -> list[pb.AuditRecord]:
        """Return all audit records of one request."""
        answer = await self._call(_FIND, pb.FindAuditRequest(request_id=request_id))
        return list(answer.records)

    async def verify_audit(self) -> pb.VerifyAuditResponse:
        """Let the guard recount its audit."""
        return await self._call(_VERIFY, pb.VerifyAuditRequest(), _VERIFY_TIMEOUT_S)

    async def _call(
        self, method: rpc.MethodRef[Req, Res], request: Req, timeout_s: float = _TIMEOUT_S
    ) -> Res:
        return await ask(self._peer, self._channel, method, request, timeout_s)


@asynccontextmanager
async def open_guard(address: str) -> AsyncIterator[GuardClient]:
    """Connect to the guard for the length of a block."""
    channel = rpc.open_channel(address)
    try:
        yield GuardClient(channel, address)
    finally:
        await channel.close()


async def check_policy_name(address: str, name: str) -> None:
    """Refuse a key's policy that the guard does not have: with it, the key would be no use.

    Args:
        address: the guard's; empty = none is known, and nothing is checked.
        name: of the policy; empty = the default one.

    Raises:
        InvalidRequest: there is no such policy.
    """
    if not (address and name):
        return
    try:
        async with open_guard(address) as guard:
            known = sorted(info.name for info in await guard.policies(_CHECK_TIMEOUT_S))
    except PeerError as error:
        say(f"{error} The policy's name was not checked.")
        return
    if name not in known:
        raise InvalidRequest(f"The guard has no policy {name!r}; it has {', '.join(known)}.")
