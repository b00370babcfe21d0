"""Tenants, their projects, plans and limits in SQL. A change reaches the tenants' keys."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from sqlalchemy import Connection, Row, insert, select, update

from headrace_billing import schema
from headrace_billing.audit import Stamp, write_audit
from headrace_billing.key_rules import DEFAULT_PROJECT, check_tenant, new_cache_salt
from headrace_billing.revisions import touch_keys
from headrace_billing.tenant_rules import check_plan, check_project, check_tenant_settings
from headrace_common.database import insert_new
from headrace_common.errors import InvalidRequest, NotFound
from headrace_contracts.billing.v1.billing_pb2 import ModelLimits, Plan, Project, Tenant
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits

_tenants, _projects, _plans = schema.tenants, schema.projects, schema.plans
# Kept in columns, so not in the record.
_COLUMNS = ("tenant_id", "name", "created_unix_s", "plan_id", "limits")
CHANGEABLE = ("name", "plan_id", "limits", "model_limits", "prepaid", "suspended")


def ensure_tenant(connection: Connection, tenant_id: str, name: str, by: Stamp) -> Tenant:
    """Create a tenant with its default project, or return the one there is.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_tenant(tenant_id, name)
    row = {
        "tenant_id": tenant_id,
        "name": name or tenant_id,
        "cache_salt": new_cache_salt(),
        "limits": to_json(Limits()),
        "created_unix_s": by.unix_s,
    }
    if insert_new(connection, _tenants, [row]):
        write_audit(connection, by, "create_tenant", tenant_id, name)
        ensure_project(connection, tenant_id, DEFAULT_PROJECT, by)
    return find_tenant(connection, tenant_id)


def find_tenant(connection: Connection, tenant_id: str) -> Tenant:
    """Return a tenant.

    Raises:
        NotFound: there is none.
    """
    query = select(_tenants).where(_tenants.c.tenant_id == tenant_id.replace("\x00", ""))
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"There is no tenant {tenant_id!r}.", param="tenant_id")
    return _tenant(row)


def list_tenants(connection: Connection) -> list[Tenant]:
    """All tenants, by id."""
    return [_tenant(row) for row in connection.execute(select(_tenants).order_by("tenant_id"))]


def update_tenant(connection: Connection, wanted: Tenant, fields: list[str], by: Stamp) -> Tenant:
    """Replace the named fields of a tenant.

    Raises:
        InvalidRequest: a field breaks its rule, or there is no such plan.
        NotFound: no such tenant.
    """
    if unknown := sorted(set(fields) - set(CHANGEABLE)):
        raise InvalidRequest(f"Cannot be changed: {', '.join(unknown)}.", param="fields")
    check_tenant_settings(wanted)
    revision_first = touch_keys(connection, [wanted.tenant_id])
    tenant = find_tenant(connection, wanted.tenant_id)
    for name in fields:
        tenant.ClearField(name)  # type: ignore[arg-type]  # a name of the tuple above
        tenant.MergeFrom(Tenant(**{name: getattr(wanted, name)}))
    if tenant.plan_id and _find_plan(connection, tenant.plan_id) is None:
        raise InvalidRequest(f"There is no plan {tenant.plan_id!r}.", param="plan_id")
    _write_tenant(connection, tenant)
    detail = f"revision {revision_first}: {to_json(tenant)}"
    write_audit(connection, by, "update_tenant", tenant.tenant_id, detail)
    return tenant


def ensure_project(connection: Connection, tenant_id: str, project_id: str, by: Stamp) -> None:
    """Create a project unless it exists."""
    row = {
        "tenant_id": tenant_id,
        "project_id": project_id,
        "limits": to_json(Limits()),
        "created_unix_s": by.unix_s,
    }
    if insert_new(connection, _projects, [row]):
        write_audit(connection, by, "create_project", f"{tenant_id}/{project_id}", "")


def put_project(connection: Connection, wanted: Project, by: Stamp) -> Project:
    """Create a project, or replace its name and limits.

    Raises:
        InvalidRequest: a field breaks its rule.
        NotFound: no such tenant.
    """
    check_project(wanted)
    find_tenant(connection, wanted.tenant_id)
    touch_keys(connection, [wanted.tenant_id])
    ensure_project(connection, wanted.tenant_id, wanted.project_id, by)
    this = (_projects.c.tenant_id == wanted.tenant_id) & (
        _projects.c.project_id == wanted.project_id
    )
    values = {"name": wanted.name, "limits": to_json(wanted.limits)}
    connection.execute(update(_projects).where(this).values(**values))
    subject = f"{wanted.tenant_id}/{wanted.project_id}"
    write_audit(connection, by, "put_project", subject, to_json(wanted))
    return _project(connection.execute(select(_projects).where(this)).one())


def list_projects(connection: Connection, tenant_id: str) -> list[Project]:
    """The projects of a tenant, by id."""
    query = select(_projects).where(_projects.c.tenant_id == tenant_id).order_by("project_id")
    return [_project(row) for row in connection.execute(query)]


def put_plan(connection: Connection, wanted: Plan, by: Stamp) -> Plan:
    """Create a plan, or replace it as a whole.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_plan(wanted)
    query = select(_tenants.c.tenant_id).where(_tenants.c.plan_id == wanted.plan_id)
    touch_keys(connection, list(connection.execute(query).scalars()))
    before = _find_plan(connection, wanted.plan_id)
    plan = Plan()
    plan.CopyFrom(wanted)
    plan.created_unix_s = before.created_unix_s if before else by.unix_s
    row = {"plan_id": plan.plan_id, "record": to_json(plan), "created_unix_s": plan.created_unix_s}
    if before is None:
        connection.execute(insert(_plans), row)
    else:
        connection.execute(
            update(_plans).where(_plans.c.plan_id == plan.plan_id).values(record=row["record"])
        )
    write_audit(connection, by, "put_plan", plan.plan_id, to_json(plan))
    return plan


def is_prepaid(connection: Connection, tenant: Tenant) -> bool:
    """Tell whether a tenant may spend its balance only: by itself or by its plan."""
    plan = _find_plan(connection, tenant.plan_id) if tenant.plan_id else None
    return tenant.prepaid or (plan is not None and plan.prepaid)


def list_plans(connection: Connection) -> list[Plan]:
    """All plans, by id."""
    rows = connection.execute(select(_plans.c.record).order_by("plan_id")).scalars()
    return [json_format.Parse(it, Plan(), ignore_unknown_fields=True) for it in rows]


def set_owner_limits(
    connection: Connection, level: int, tenant_id: str, scope_id: str, limits: Limits, by: Stamp
) -> None:
    """Replace the limits of a project, a tenant or a model of a tenant.

    Raises:
        InvalidRequest: a field breaks its rule, or this level has none.
        NotFound: no such tenant or project.
    """
    tenant = find_tenant(connection, tenant_id)
    match level:
        case ratelimit_pb2.LEVEL_TENANT:
            tenant.limits.CopyFrom(limits)
            update_tenant(connection, tenant, ["limits"], by)
        case ratelimit_pb2.LEVEL_MODEL:
            others = [it for it in tenant.model_limits if it.model != scope_id]
            mine = [ModelLimits(model=scope_id, limits=limits)] if limits.ListFields() else []
            changed = Tenant(tenant_id=tenant_id, model_limits=[*others, *mine])
            update_tenant(connection, changed, ["model_limits"], by)
        case ratelimit_pb2.LEVEL_PROJECT:
            known = {it.project_id: it for it in list_projects(connection, tenant_id)}
            if scope_id not in known:
                raise NotFound(f"There is no project {scope_id!r}.", param="scope_id")
            known[scope_id].limits.CopyFrom(limits)
            put_project(connection, known[scope_id], by)
        case _:
            raise InvalidRequest("level must be key, project, tenant or model.", param="level")


def to_json(message: Any) -> str:  # Any: one of the contracts' messages
    """Render a message for a column."""
    text: str = json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None)
    return text


def _find_plan(connection: Connection, plan_id: str) -> Plan | None:
    query = select(_plans.c.record).where(_plans.c.plan_id == plan_id)
    record = connection.execute(query).scalar_one_or_none()
    if record is None:
        return None
    return json_format.Parse(record, Plan(), ignore_unknown_fields=True)


def _write_tenant(connection: Connection, tenant: Tenant) -> None:
    record = Tenant()
    record.CopyFrom(tenant)
    for name in _COLUMNS:
        record.ClearField(name)  # type: ignore[arg-type]  # a name of the tuple above
    connection.execute(
        update(_tenants)
        .where(_tenants.c.tenant_id == tenant.tenant_id)
        .values(
            name=tenant.name,
            plan_id=tenant.plan_id,
            limits=to_json(tenant.limits),
            record=to_json(record),
        )
    )


def _tenant(row: Row[Any]) -> Tenant:  # Any: columns of tenants
    tenant: Tenant = json_format.Parse(row.record, Tenant(), ignore_unknown_fields=True)
    tenant.tenant_id, tenant.name, tenant.plan_id = row.tenant_id, row.name, row.plan_id
    tenant.created_unix_s = row.created_unix_s
    limits = json_format.Parse(row.limits, Limits())
    if limits.ListFields():
        tenant.limits.CopyFrom(limits)
    return tenant


def _project(row: Row[Any]) -> Project:  # Any: columns of projects
    project = Project(
        tenant_id=row.tenant_id,
        project_id=row.project_id,
        name=row.name,
        created_unix_s=row.created_unix_s,
    )
    project.limits.CopyFrom(json_format.Parse(row.limits, Limits()))
    return project
