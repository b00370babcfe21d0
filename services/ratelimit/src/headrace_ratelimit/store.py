"""The Redis side: the library of one function, its operations and their answers.

Keys, all made from ``hr:rl:{tenant}`` (one hash tag, so one slot):

======================  ======  ===========================================================
``<base>:<scope>``      string  all rates, counts and budgets of a scope: a record of doubles
                                (`lua/records.lua`); lives as long as anything in it counts
``<base>:slots:<scope>``  zset  lease ids that take up slots of a scope, by expiry
``<base>:live``         zset    live leases, by expiry: what the sweep looks at
``<base>:holds``        hash    what each live lease holds
``<base>:late:<id>``    string  likewise, of an expired lease; ten minutes
``<base>:done:<id>``    string  a lease granted without Redis was booked; ten minutes
``<base>:since``        string  since when no data of this tenant was lost
======================  ======  ===========================================================

A scope is a level and an id ("1:key_01"), so it never begins like one of the words above, and may
end in any way. One record per scope and a library that stays loaded: docs/adr/0019.

A lease that nobody renews is ended by whatever call of its tenant comes next: each call sweeps
first. Nothing that a missing sweep leaves behind can let a request pass, it can only hold one back.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from headrace_common.limits.limiter import (
    MINUTE_US,
    NEVER,
    Amounts,
    Charge,
    Window,
)
from headrace_common.limits.local_share import Foreign
from headrace_common.limits.memory_limiter import Hold
from headrace_common.limits.plans import ChargeSet, Plan, flat_charges
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb

# What the script answers to one operation. Any: numbers, lists of numbers, ids.
Reply = Any

_PARTS = ("common", "records", "leases", "admit", "settle", "renew", "seed", "main")
_ADMIT, _SETTLE, _RENEW, _SEED = 1, 2, 3, 4
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Library:
    """The function as Redis loads it. Named by its text: versions live side by side."""

    name: str
    text: str


def library() -> Library:
    """Read the library's parts."""
    folder = resources.files("headrace_ratelimit") / "lua"
    text = "".join((folder / f"{name}.lua").read_text() for name in _PARTS)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = f"headrace_ratelimit_{digest}"
    return Library(name, f"#!lua name={name}\nlocal LIBRARY = '{name}'\n{text}")


class Op(NamedTuple):
    """One operation on one tenant's limits.

    ``body`` is the script's, without the number of ``charge_set``, which `call_args` gives it.
    """

    tenant_id: str
    body: tuple[Any, ...]  # Any: numbers, ids and lists of them
    charge_set: bytes | None = None


def admit_op(plan: Plan) -> Op:
    """Encode an admission."""
    body = (_ADMIT, plan.lease_id, plan.lease_us, plan.mode.value, *plan.amounts.measures)
    return Op(plan.tenant_id, body, plan.charges.packed)


def settle_op(tenant_id: str, lease_id: str, actual: Amounts, foreign: Foreign) -> Op:
    """Encode a settlement."""
    budgets = [value for kind, scope in foreign for value in (kind.value, scope)]
    return Op(tenant_id, (_SETTLE, lease_id, *actual.measures, *budgets))


def renew_op(tenant_id: str, lease_ids: Sequence[str], lease_us: int) -> Op:
    """Encode a renewal."""
    return Op(tenant_id, (_RENEW, lease_us, list(lease_ids)))


def seed_op(
    tenant_id: str,
    spends: Iterable[tuple[Charge, int, int]],
    holds: Iterable[Hold],
    lease_us: int,
) -> Op:
    """Encode a rebuilding of budgets: see `MemoryLimiter.seed`."""
    flat_spends = [
        value
        for charge, at_us, spent in spends
        for value in (charge.kind.value, charge.scope, at_us, spent)
    ]
    flat_holds = [
        value
        for hold in holds
        for value in (
            hold.lease_id,
            flat_charges(hold.charges),
            hold.admitted_us,
            hold.cost_nano_usd,
        )
    ]
    return Op(tenant_id, (_SEED, lease_us, flat_spends, flat_holds))


def call_args(ops: Sequence[Op], *, has_ledger: bool, now_us: int = 0) -> list[str | bytes]:
    """Encode the operations of one tenant as the function's key and arguments.

    Args:
        ops: of one tenant, at least one; they run in order.
        has_ledger: a budget that is not in Redis may have been lost.
        now_us: 0 = Redis' own clock; anything else is for tests.
    """
    sets: dict[bytes, int] = {}
    bodies: list[tuple[Any, ...]] = []  # Any: see Op
    for op in ops:
        if op.charge_set is None:
            bodies.append(op.body)
        else:
            idx = sets.setdefault(op.charge_set, len(sets))
            bodies.append((op.body[0], idx, *op.body[1:]))
    flag = "1" if has_ledger else "0"
    return [f"hr:rl:{{{ops[0].tenant_id}}}", str(now_us), flag, _encode(bodies), *sets]


@functools.lru_cache(maxsize=256)
def _numbers(size_bytes: int) -> struct.Struct:
    return struct.Struct(f"<{size_bytes // 8}q")


def unpacked(reply: Reply) -> Reply:
    """Unpack the answer to one operation, if it is packed numbers."""
    return _numbers(len(reply)).unpack(reply) if isinstance(reply, bytes) else reply


def answer_of_reply(
    charges: ChargeSet, reply: Reply, *, is_brief: bool = False
) -> pb.AdmitResponse:
    """Decode and render the answer to an admission at once; not for UNSEEDED.

    The same as `plans.answer_of` of a `Decision`, in a third of the time, or a tenth if it is
    brief: it is most of what an admission costs here.
    """
    remaining, resets_us = _numbers_of_reply(charges, reply)
    # The outcomes' numbers are the contract's.
    if is_brief:
        response = pb.AdmitResponse(outcome=reply[0], remaining=remaining, reset_us=resets_us)
    else:
        states = [
            pb.DimensionState(
                level=level, dimension=dimension, limit=limit, remaining=left, reset_us=reset_us
            )
            for (level, dimension, limit, _), left, reset_us in zip(
                charges.rows, remaining, resets_us, strict=True
            )
        ]
        response = pb.AdmitResponse(outcome=reply[0], states=states)
    if reply[1] >= 0:
        response.binding_level, response.binding_dimension = charges.rows[reply[1]][:2]
        response.retry_after_us = 0 if reply[2] == NEVER else reply[2]
    return response


def _numbers_of_reply(charges: ChargeSet, reply: Reply) -> tuple[list[int], list[int]]:
    """Decode what is left of each charge, and when all of it is there again."""
    remaining, resets_us = [], []
    place = 3
    for limit, full in charges.sizes:
        used, reset_us = reply[place], reply[place + 1]
        place += 2
        if full:
            left = (full - used * limit - reset_us) // MINUTE_US
            reset_us = used + 1 if reset_us else used
        else:
            left = limit - used
        remaining.append(left if left > 0 else 0)
        resets_us.append(reset_us)
    return remaining, resets_us


def windows_of(charges: ChargeSet, reply: Reply) -> list[tuple[int, Window]]:
    """Decode which windows of which charges must be rebuilt, by an UNSEEDED answer."""
    return [(idx, Window("", reply[3 + 2 * idx], reply[4 + 2 * idx])) for idx in charges.budgets]
