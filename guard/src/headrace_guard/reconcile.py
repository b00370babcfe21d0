"""Compares what the guard read and released with what the gateway says it sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum

from headrace_contracts.guard.v1 import guard_pb2 as pb


class Leak(Enum):
    """Text went out that the guard had not let out. Small: it is a metric label."""

    LEAK = "leak"
    FAIL_OPEN = "fail_open"
    # The guard's record of what it had let out was lost, mostly with the guard itself.
    GUARD_LOST = "guard_lost"


def leak_in(records: Sequence[pb.AuditRecord], *, has_lost: bool = False) -> Leak | None:
    """Say whether more went out than was scanned and released, in any choice of the answer.

    Args:
        records: all of one request, the gateway's report among them. It may be there twice: the
            gateway tells again what it does not know to have arrived.
        has_lost: records of it are known to be lost.
    """
    outputs = [record for record in records if record.kind == pb.AUDIT_KIND_OUTPUT]
    reports = _told(record for record in records if record.kind == pb.AUDIT_KIND_SENT)
    if any(record.released_chars > record.scanned_chars for record in outputs):
        return Leak.LEAK
    released: Counter[int] = Counter()
    resumed = {record.choice_idx for record in outputs if record.resumed_chars}
    for record in outputs:
        choice_idx, num_chars = record.choice_idx, record.released_text_chars
        # A guard that took a choice over says all of it again.
        before = released[choice_idx]
        released[choice_idx] = (
            max(before, num_chars) if choice_idx in resumed else before + num_chars
        )
    sent: Counter[int] = Counter()
    for record in reports:
        sent.update(record.released_chars_by_choice)
    # A choice that was cut short must not make up for one of which too much went out.
    is_less = all(count <= released[choice] for choice, count in sent.items())
    if is_less and sum(record.released_chars for record in reports) <= released.total():
        return None
    if all(record.fail_open for record in reports):
        return Leak.FAIL_OPEN
    is_lost = has_lost or all(record.guard_lost for record in reports)
    return Leak.GUARD_LOST if is_lost else Leak.LEAK


def _told(reports: Iterable[pb.AuditRecord]) -> list[pb.AuditRecord]:
    """Return each report once, however often it was repeated, also after a loss of the guard."""
    by_content = {
        (
            record.released_chars,
            tuple(sorted(record.released_chars_by_choice.items())),
            record.fail_open,
        ): record
        for record in sorted(reports, key=lambda it: it.guard_lost)
    }
    return list(by_content.values())
