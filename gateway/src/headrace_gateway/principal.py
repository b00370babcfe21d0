"""Whose key a request came with, as billing told it, in values that cost nothing to read.

Each field of a protobuf message is looked up, and a string made anew, whenever it is read; a
request reads some thirty of its key's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.guard.v1.guard_pb2 import OutputOpen, PolicyRef, SentReport
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import LEVEL_MODEL, Scope
from headrace_contracts.types.v1.types_pb2 import PRIORITY_UNSPECIFIED, Priority
from headrace_gateway.limit_states import Limit, limits_of


class Charged(NamedTuple):
    """The scopes that a request is charged to, and their limits."""

    scopes: list[Scope]
    limits: tuple[Limit, ...]


@dataclass
class Principal:
    """A `billing.v1.Principal`; its contract says what the fields mean. Never changed once used."""

    tenant_id: str = ""
    project_id: str = ""
    key_id: str = ""
    scopes: Sequence[str] = ()
    allowed_models: Sequence[str] = ()
    limits: Sequence[Scope] = ()
    guard_policy: str = ""
    guard_blocklist: Sequence[str] = ()
    guard_fail_open: bool = False
    cache_salt: bytes = b""
    expires_unix_s: int = 0
    priority: Priority.ValueType = PRIORITY_UNSPECIFIED
    prepaid: bool = False
    counts_cached_input: bool = False
    model_limits: Sequence[billing_pb2.ModelLimits] = ()
    # By model; "" = all without limits of their own.
    _charged: dict[str, Charged] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, told: billing_pb2.Principal) -> Principal:
        """Take what billing told."""
        return cls(
            tenant_id=told.tenant_id,
            project_id=told.project_id,
            key_id=told.key_id,
            scopes=tuple(told.scopes),
            allowed_models=tuple(told.allowed_models),
            limits=tuple(told.limits),
            guard_policy=told.guard_policy,
            guard_blocklist=tuple(told.guard_blocklist),
            guard_fail_open=told.guard_fail_open,
            cache_salt=told.cache_salt,
            expires_unix_s=told.expires_unix_s,
            priority=told.priority,
            prepaid=told.prepaid,
            counts_cached_input=told.counts_cached_input,
            model_limits=tuple(told.model_limits),
        )

    def charged(self, model: str) -> Charged:
        """Return what a request for *model* is charged to."""
        own = [it for it in self.model_limits if it.model == model]
        name = model if own else ""
        charged = self._charged.get(name)
        if charged is None:
            scope_id = f"{self.tenant_id}/{model}"
            scopes = [
                *self.limits,
                *(Scope(level=LEVEL_MODEL, scope_id=scope_id, limits=it.limits) for it in own),
            ]
            charged = self._charged[name] = Charged(scopes, limits_of(scopes))
        return charged

    @cached_property
    def guard_head(self) -> bytes:
        """What the guard is told of a key, the same in its questions on inputs and outputs."""
        return OutputOpen(
            tenant_id=self.tenant_id,
            key_id=self.key_id,
            policy=PolicyRef(policy=self.guard_policy, blocklist=self.guard_blocklist),
        ).SerializeToString()

    @cached_property
    def report_head(self) -> bytes:
        """What the guard is told of a key in reports of what was sent."""
        return SentReport(tenant_id=self.tenant_id, key_id=self.key_id).SerializeToString()
