"""Which call of the contracts stands at which path of the admin API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from headrace_contracts.billing.v1 import billing_pb2 as pb

_SERVICES = {
    name.lower(): pb.DESCRIPTOR.services_by_name[name]
    for name in ("Admin", "Accounts", "Books", "Ledger")
}


@dataclass(frozen=True)
class Route:
    """One path.

    Attributes:
        service: lower case name of the service.
        body: the field that the JSON body is; empty = it is the whole message.
        path_fields: name in the path -> the field it fills, dotted.
        patches: the names in the body are the fields to replace.
    """

    method: str
    path: str
    service: str
    call: str
    body: str = ""
    path_fields: Mapping[str, str] = field(default_factory=dict)
    patches: bool = False

    @property
    def request(self) -> Any:  # Any: a class of messages
        """The request's class."""
        return GetMessageClass(_method(self).input_type)

    @property
    def response(self) -> Any:  # Any: a class of messages
        """The answer's class."""
        return GetMessageClass(_method(self).output_type)


def _method(route: Route) -> Any:  # Any: a method's descriptor
    service: ServiceDescriptor = _SERVICES[route.service]
    return service.methods_by_name[route.call]


_TENANT = {"tenant_id": "tenant_id"}
_INVOICE = {"invoice_id": "invoice_id"}
_KEY = {"key_id": "key_id"}

ROUTES = (
    Route("GET", "/tenants", "admin", "ListTenants"),
    Route("POST", "/tenants", "admin", "CreateTenant"),
    Route(
        "PATCH",
        "/tenants/{tenant_id}",
        "accounts",
        "UpdateTenant",
        "tenant",
        {"tenant_id": "tenant.tenant_id"},
        patches=True,
    ),
    Route("GET", "/tenants/{tenant_id}/projects", "accounts", "ListProjects", "", _TENANT),
    Route(
        "PUT",
        "/tenants/{tenant_id}/projects/{project_id}",
        "accounts",
        "PutProject",
        "project",
        {"tenant_id": "project.tenant_id", "project_id": "project.project_id"},
    ),
    Route("GET", "/tenants/{tenant_id}/credits", "accounts", "ListCredits", "", _TENANT),
    Route("POST", "/tenants/{tenant_id}/credits", "accounts", "GrantCredit", "", _TENANT),
    Route("GET", "/tenants/{tenant_id}/balance", "accounts", "GetBalance", "", _TENANT),
    Route("GET", "/tenants/{tenant_id}/invoices", "accounts", "ListInvoices", "", _TENANT),
    Route("POST", "/tenants/{tenant_id}/invoices", "accounts", "IssueInvoice", "", _TENANT),
    Route("GET", "/tenants/{tenant_id}/usage", "ledger", "SumUsage", "", _TENANT),
    Route("GET", "/invoices/{invoice_id}", "accounts", "GetInvoice", "", _INVOICE),
    Route("POST", "/invoices/{invoice_id}/corrections", "accounts", "CorrectInvoice", "", _INVOICE),
    Route("GET", "/plans", "accounts", "ListPlans"),
    Route("PUT", "/plans/{plan_id}", "accounts", "PutPlan", "plan", {"plan_id": "plan.plan_id"}),
    Route("GET", "/keys", "admin", "ListKeys"),
    Route("POST", "/keys", "admin", "CreateKey", "key"),
    Route(
        "PATCH",
        "/keys/{key_id}",
        "admin",
        "UpdateKey",
        "key",
        {"key_id": "key.key_id"},
        patches=True,
    ),
    Route("DELETE", "/keys/{key_id}", "admin", "RevokeKey", "", _KEY),
    Route("POST", "/keys/{key_id}/rotate", "accounts", "RotateKey", "", _KEY),
    Route("PUT", "/limits", "admin", "SetLimits"),
    Route("POST", "/prices", "admin", "SetPrice", "price"),
    Route("GET", "/audit", "accounts", "ListAudit"),
    Route("GET", "/ledger/usage", "ledger", "ListUsage"),
    Route("POST", "/ledger/verify", "ledger", "Verify"),
    Route("POST", "/ledger/replay", "books", "Replay"),
    Route("POST", "/ledger/reconcile", "books", "Reconcile"),
    Route("GET", "/ledger/dead-letters", "books", "ListDeadLetters"),
)
