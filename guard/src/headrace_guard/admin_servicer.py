"""The GuardAdmin service: policies and the audit, for operators."""

from __future__ import annotations

from headrace_common.rpc import Call
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.audit_log import AuditLog
from headrace_guard.policy import Policy
from headrace_guard.policy_book import PolicyBook
from headrace_guard.policy_store import policy_text


class GuardAdminServicer:
    """GuardAdmin contract.

    Args:
        book: policies in force.
        audit: what was judged.
    """

    def __init__(self, book: PolicyBook, audit: AuditLog) -> None:
        self._book, self._audit = book, audit

    async def ListPolicies(  # noqa: N802 - contract name
        self, _request: pb.ListPoliciesRequest, _call: Call
    ) -> pb.ListPoliciesResponse:
        """List the policies in force."""
        return self._list()

    async def GetPolicy(  # noqa: N802 - contract name
        self, request: pb.GetPolicyRequest, _call: Call
    ) -> pb.PolicyDocument:
        """Return one policy as TOML."""
        return self._document(self._book.get(request.name))

    async def PutPolicy(  # noqa: N802 - contract name
        self, request: pb.PutPolicyRequest, _call: Call
    ) -> pb.PolicyDocument:
        """Check, keep and apply one policy."""
        return self._document(await self._book.put(request.name, request.toml, request.if_version))

    async def DeletePolicy(  # noqa: N802 - contract name
        self, request: pb.DeletePolicyRequest, _call: Call
    ) -> pb.ListPoliciesResponse:
        """Drop a put policy."""
        await self._book.delete(request.name)
        return self._list()

    async def ReloadPolicies(  # noqa: N802 - contract name
        self, _request: pb.ReloadPoliciesRequest, _call: Call
    ) -> pb.ListPoliciesResponse:
        """Read everything again."""
        await self._book.reload()
        return self._list()

    async def FindAudit(  # noqa: N802 - contract name
        self, request: pb.FindAuditRequest, _call: Call
    ) -> pb.FindAuditResponse:
        """Return all records of one request."""
        return pb.FindAuditResponse(records=await self._audit.find(request.request_id))

    async def VerifyAudit(  # noqa: N802 - contract name
        self, _request: pb.VerifyAuditRequest, _call: Call
    ) -> pb.VerifyAuditResponse:
        """Recount the chain."""
        count, problems = await self._audit.verify()
        return pb.VerifyAuditResponse(ok=not problems, num_records=count, problems=problems)

    def _list(self) -> pb.ListPoliciesResponse:
        policies = self._book.policies.by_name
        return pb.ListPoliciesResponse(
            policies=[self._info(policies[name]) for name in sorted(policies)]
        )

    def _document(self, policy: Policy) -> pb.PolicyDocument:
        return pb.PolicyDocument(info=self._info(policy), toml=policy_text(policy))

    def _info(self, policy: Policy) -> pb.PolicyInfo:
        return pb.PolicyInfo(
            name=policy.name,
            version=policy.version,
            is_put=policy.name in self._book.policies.put,
            fails_open=policy.fails_open,
        )
