"""What operators alone ask: plans, projects, money, the audit."""

from __future__ import annotations

from headrace_billing import audit, credit_store, invoice_store, key_store, tenant_store
from headrace_billing.desk import Desk
from headrace_billing.key_rules import check_storable
from headrace_common.rpc import Call
from headrace_contracts.billing.v1 import billing_pb2 as pb


class AccountsService:
    """Servicer of `headrace.billing.v1.Accounts`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def UpdateTenant(self, request: pb.UpdateTenantRequest, call: Call) -> pb.Tenant:  # noqa: N802 - contract name
        """Replace the named fields of a tenant."""
        return await self._desk.change(
            call,
            request,
            pb.Tenant,
            lambda it, by: tenant_store.update_tenant(it, request.tenant, list(request.fields), by),
        )

    async def PutProject(self, request: pb.PutProjectRequest, call: Call) -> pb.Project:  # noqa: N802 - contract name
        """Create a project, or replace its name and limits."""
        return await self._desk.change(
            call,
            request,
            pb.Project,
            lambda it, by: tenant_store.put_project(it, request.project, by),
        )

    async def ListProjects(  # noqa: N802 - contract name
        self, request: pb.ListProjectsRequest, _call: Call
    ) -> pb.ListProjectsResponse:
        """A tenant's projects."""
        found = await self._desk.read(
            lambda it: tenant_store.list_projects(it, request.tenant_id.replace("\x00", ""))
        )
        return pb.ListProjectsResponse(projects=found)

    async def PutPlan(self, request: pb.PutPlanRequest, call: Call) -> pb.Plan:  # noqa: N802 - contract name
        """Create a plan, or replace it as a whole."""
        return await self._desk.change(
            call, request, pb.Plan, lambda it, by: tenant_store.put_plan(it, request.plan, by)
        )

    async def ListPlans(self, _request: pb.ListPlansRequest, _call: Call) -> pb.ListPlansResponse:  # noqa: N802 - contract name
        """All plans."""
        return pb.ListPlansResponse(plans=await self._desk.read(tenant_store.list_plans))

    async def RotateKey(self, request: pb.RotateKeyRequest, call: Call) -> pb.CreateKeyResponse:  # noqa: N802 - contract name
        """A new secret; the old one opens the door until the overlap is over."""
        return await self._desk.change(
            call,
            request,
            pb.CreateKeyResponse,
            lambda it, by: key_store.rotate_key(it, request.key_id, request.overlap_s, by),
        )

    async def GrantCredit(self, request: pb.GrantCreditRequest, call: Call) -> pb.Credit:  # noqa: N802 - contract name
        """Put money onto a tenant's account."""
        return await self._desk.change(
            call, request, pb.Credit, lambda it, by: credit_store.grant_credit(it, request, by)
        )

    async def ListCredits(  # noqa: N802 - contract name
        self, request: pb.ListCreditsRequest, _call: Call
    ) -> pb.ListCreditsResponse:
        """A tenant's credits, oldest first."""
        tenant_id = request.tenant_id.replace("\x00", "")
        found = await self._desk.read(lambda it: credit_store.list_credits(it, tenant_id))
        return pb.ListCreditsResponse(credits=found)

    async def GetBalance(self, request: pb.GetBalanceRequest, _call: Call) -> pb.Balance:  # noqa: N802 - contract name
        """How a tenant stands."""
        return await self._desk.read(lambda it: credit_store.balance(it, request.tenant_id))

    async def IssueInvoice(self, request: pb.IssueInvoiceRequest, call: Call) -> pb.Invoice:  # noqa: N802 - contract name
        """Bill what no invoice holds yet."""
        return await self._desk.change(
            call, request, pb.Invoice, lambda it, by: invoice_store.issue_invoice(it, request, by)
        )

    async def CorrectInvoice(self, request: pb.CorrectInvoiceRequest, call: Call) -> pb.Invoice:  # noqa: N802 - contract name
        """Give a part of an invoice back."""
        return await self._desk.change(
            call, request, pb.Invoice, lambda it, by: invoice_store.correct_invoice(it, request, by)
        )

    async def ListInvoices(  # noqa: N802 - contract name
        self, request: pb.ListInvoicesRequest, _call: Call
    ) -> pb.ListInvoicesResponse:
        """A tenant's invoices, without their lines."""
        tenant_id = request.tenant_id.replace("\x00", "")
        found = await self._desk.read(lambda it: invoice_store.list_invoices(it, tenant_id))
        return pb.ListInvoicesResponse(invoices=found)

    async def GetInvoice(self, request: pb.GetInvoiceRequest, _call: Call) -> pb.Invoice:  # noqa: N802 - contract name
        """One invoice with its lines."""
        return await self._desk.read(lambda it: invoice_store.get_invoice(it, request.invoice_id))

    async def ListAudit(self, request: pb.ListAuditRequest, _call: Call) -> pb.ListAuditResponse:  # noqa: N802 - contract name
        """Who changed what."""
        check_storable(request)
        return await self._desk.read(lambda it: audit.list_audit(it, request))
