"""Money that moves without a request: rules and postings of credits, without storage."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_billing.key_rules import MAX_NAME_CHARS, MAX_UNIX_S, check_slug, check_text
from headrace_billing.ledger import Posting, account_of
from headrace_common.errors import InvalidRequest
from headrace_contracts.billing.v1 import billing_pb2 as pb

# A billion USD: more is a mistake in the unit.
MAX_CREDIT_NANO_USD = 10**18
_SOURCES = {
    pb.Credit.KIND_PAYMENT: "cash",
    pb.Credit.KIND_PROMOTION: "promotions",
    pb.Credit.KIND_CORRECTION: "corrections",
    pb.Credit.KIND_EXPIRY: "expired_credits",
}


def check_grant(request: pb.GrantCreditRequest, now_unix_s: int) -> None:
    """Check a credit.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_slug(request.credit_id, "credit_id")
    check_text(request.note, MAX_NAME_CHARS, "note")
    if not 0 < request.amount_nano_usd <= MAX_CREDIT_NANO_USD:
        raise InvalidRequest(
            f"amount_nano_usd must be 1 to {MAX_CREDIT_NANO_USD}.", param="amount_nano_usd"
        )
    if request.expires_unix_s and not now_unix_s < request.expires_unix_s <= MAX_UNIX_S:
        raise InvalidRequest("expires_unix_s must lie ahead.", param="expires_unix_s")
    if request.kind not in (
        pb.Credit.KIND_UNSPECIFIED,
        pb.Credit.KIND_PAYMENT,
        pb.Credit.KIND_PROMOTION,
    ):
        raise InvalidRequest("kind must be payment or promotion.", param="kind")


def postings_of(credit: pb.Credit) -> tuple[Posting, Posting]:
    """Return both sides of a credit."""
    is_expiry = credit.kind == pb.Credit.KIND_EXPIRY
    amount = -credit.amount_nano_usd if is_expiry else credit.amount_nano_usd
    return (
        Posting(_SOURCES[credit.kind], amount),
        Posting(account_of(credit.tenant_id), -amount),
    )


def unused(credits_: Sequence[pb.Credit], ending: pb.Credit, used_nano_usd: int) -> int:
    """Return what is left of a credit that ends now. Money that ends first is used first.

    Args:
        credits_: all of the tenant's, expiries included.
        ending: one of them.
        used_nano_usd: all that the tenant ever spent, and what running requests hold.
    """
    granted = taken = 0
    for it in credits_:
        if it.kind == pb.Credit.KIND_EXPIRY:
            taken += it.amount_nano_usd
        elif 0 < it.expires_unix_s <= ending.expires_unix_s:
            granted += it.amount_nano_usd
    return min(ending.amount_nano_usd, max(0, granted - taken - used_nano_usd))


def expiry_of(ending: pb.Credit, amount_nano_usd: int, now_unix_s: int) -> pb.Credit:
    """Return the counter-entry to a credit that has ended."""
    return pb.Credit(
        tenant_id=ending.tenant_id,
        # No credit that is granted can have such an id.
        credit_id=f"{ending.credit_id}.expiry",
        amount_nano_usd=amount_nano_usd,
        kind=pb.Credit.KIND_EXPIRY,
        note=f"what was left of {ending.credit_id}",
        created_unix_s=now_unix_s,
    )
