"""Rules of tenants' settings, projects and plans, without storage."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_billing.key_rules import (
    MAX_MODELS,
    MAX_NAME_CHARS,
    check_limits,
    check_list,
    check_slug,
    check_text,
)
from headrace_common.errors import InvalidRequest
from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.types.v1 import types_pb2


def check_tenant_settings(tenant: billing_pb2.Tenant) -> None:
    """Check what `UpdateTenant` may replace.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_text(tenant.name, MAX_NAME_CHARS, "tenant.name")
    if tenant.plan_id:
        check_slug(tenant.plan_id, "tenant.plan_id")
    check_limits(tenant.limits, "tenant.limits")
    _check_model_limits(tenant.model_limits, "tenant.model_limits")


def check_project(project: billing_pb2.Project) -> None:
    """Check a project.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_slug(project.tenant_id, "project.tenant_id")
    check_slug(project.project_id, "project.project_id")
    check_text(project.name, MAX_NAME_CHARS, "project.name")
    check_limits(project.limits, "project.limits")


def check_plan(plan: billing_pb2.Plan) -> None:
    """Check a plan.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_slug(plan.plan_id, "plan.plan_id")
    check_text(plan.name, MAX_NAME_CHARS, "plan.name")
    check_limits(plan.tenant_limits, "plan.tenant_limits")
    check_limits(plan.key_limits, "plan.key_limits")
    _check_model_limits(plan.model_limits, "plan.model_limits")
    check_list(plan.allowed_models, MAX_MODELS, 128, "plan.allowed_models")
    if plan.priority not in types_pb2.Priority.values():
        raise InvalidRequest("This priority is not known.", param="plan.priority")


def _check_model_limits(models: Iterable[billing_pb2.ModelLimits], param: str) -> None:
    names = [it.model for it in models]
    check_list(names, MAX_MODELS, 128, param)
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{param} names a model twice.", param=param)
    if any("{" in it or "}" in it for it in names):
        # Such a name cannot be a part of the limiter's keys.
        raise InvalidRequest(f"{param} must not name models with braces.", param=param)
    for it in models:
        check_limits(it.limits, param)
