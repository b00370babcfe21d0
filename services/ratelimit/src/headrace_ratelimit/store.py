"""The Redis side: scripts, their arguments and answers.

Keys, all made from ``hr:rl:{tenant}`` (one hash tag, so one slot):

=======================  ======  ==========================================================
``<base>:<name>``        string  a rate's TAT, "microseconds rest limit"; lives until it is past
``<base>:<name>``        zset    lease ids that take up slots, by expiry
``<base>:<name>:<win>``  string  requests of a day
``<base>:<name>:<win>``  hash    a budget's window: spent, held
``<base>:leases``        zset    live leases, by expiry: what the sweep looks at
``<base>:lease:<id>``    string  what a lease holds (MessagePack)
``<base>:late:<id>``     string  likewise, of an expired lease; ten minutes
``<base>:done:<id>``     string  a lease granted without Redis was booked; ten minutes
=======================  ======  ==========================================================

A lease that nobody renews is ended by whatever call of its tenant comes next: each script sweeps
first. Nothing that a missing sweep leaves behind can let a request pass, it can only hold one back.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from importlib import resources

from headrace_ratelimit.limiter import (
    Amounts,
    Charge,
    Decision,
    Kind,
    Outcome,
    State,
    rate_state,
    window_state,
)
from headrace_ratelimit.plans import Plan

# (kind, name) of each budget that a lease granted without Redis is booked to.
Foreign = list[tuple[Kind, str]]


class Script(Enum):
    """The three scripts."""

    ADMIT = "admit"
    SETTLE = "settle"
    RENEW = "renew"


def source_of(script: Script) -> str:
    """Return the script's full text."""
    folder = resources.files("headrace_ratelimit") / "lua"
    return "".join((folder / f"{name}.lua").read_text() for name in ("common", script.value))


def sha1_of(source: str) -> str:
    """Return the name under which Redis keeps a script."""
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Command:
    """One call of a script."""

    script: Script
    key: str
    args: list[str | int]


def _base(tenant_id: str) -> str:
    return f"hr:rl:{{{tenant_id}}}"


def admit_command(plan: Plan, now_us: int = 0) -> Command:
    """Encode an admission. *now_us* = 0: Redis' own clock; anything else is for tests."""
    args: list[str | int] = [now_us, plan.lease_id, plan.lease_us]
    for charge in plan.charges:
        args += [charge.kind.value, charge.measure.value, charge.limit, charge.cost, charge.name]
    return Command(Script.ADMIT, _base(plan.tenant_id), args)


def settle_command(
    tenant_id: str, lease_id: str, actual: Amounts, foreign: Foreign, now_us: int = 0
) -> Command:
    """Encode a settlement."""
    args: list[str | int] = [
        now_us,
        lease_id,
        actual.requests,
        actual.input_tokens,
        actual.output_tokens,
        actual.input_tokens + actual.output_tokens,
        actual.cost_nano_usd,
    ]
    for kind, name in foreign:
        args += [kind.value, name]
    return Command(Script.SETTLE, _base(tenant_id), args)


def renew_command(tenant_id: str, lease_ids: list[str], lease_us: int, now_us: int = 0) -> Command:
    """Encode a renewal."""
    return Command(Script.RENEW, _base(tenant_id), [now_us, lease_us, *lease_ids])


def decision_of(plan: Plan, reply: list[int]) -> Decision:
    """Decode the answer of the admit script."""
    outcome, binding_idx, wait_us, *numbers = reply
    states = [
        _state(charge, used, rest)
        for charge, used, rest in zip(plan.charges, numbers[::2], numbers[1::2], strict=True)
    ]
    return Decision(Outcome(outcome), binding_idx, wait_us, states)


def _state(charge: Charge, used: int, rest: int) -> State:
    if charge.kind is Kind.RATE:
        return rate_state(charge.limit, used, rest)
    return window_state(charge.limit, used, rest)
