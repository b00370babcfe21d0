"""Money that moves without a request: rules and postings of credits, without storage."""

from __future__ import annotations

from headrace_billing.key_rules import MAX_NAME_CHARS, check_slug, check_text
from headrace_billing.ledger import Posting
from headrace_common.errors import InvalidRequest
from headrace_contracts.billing.v1 import billing_pb2 as pb

# A billion USD: more is a mistake in the unit.
MAX_CREDIT_NANO_USD = 10**18
_SOURCES = {
    pb.Credit.KIND_PAYMENT: "cash",
    pb.Credit.KIND_PROMOTION: "promotions",
    pb.Credit.KIND_CORRECTION: "corrections",
}


def account_of(tenant_id: str) -> str:
    """Return the account on which a tenant owes (above 0) or has money (below 0)."""
    return f"receivable:{tenant_id}"


def check_grant(request: pb.GrantCreditRequest) -> None:
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
    if request.kind not in (
        pb.Credit.KIND_UNSPECIFIED,
        pb.Credit.KIND_PAYMENT,
        pb.Credit.KIND_PROMOTION,
    ):
        raise InvalidRequest("kind must be payment or promotion.", param="kind")


def postings_of(credit: pb.Credit) -> tuple[Posting, Posting]:
    """Return both sides of a credit."""
    return (
        Posting(_SOURCES[credit.kind], credit.amount_nano_usd),
        Posting(account_of(credit.tenant_id), -credit.amount_nano_usd),
    )
