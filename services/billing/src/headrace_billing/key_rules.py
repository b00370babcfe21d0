"""Rules of API keys, without storage: how they are drawn, what they hold, whom they stand for."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.message import Message

from headrace_common.errors import InvalidRequest, KeyRevoked
from headrace_common.ids import is_slug
from headrace_common.limits.limiter import MAX_NANO_USD, MAX_RATE_LIMIT
from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_contracts.types.v1 import types_pb2

KEY_START = "sk-hr-"
DEFAULT_PROJECT = "default"
CACHE_SALT_BYTES = 16
HASH_BYTES = 32
# Columns are signed.
MAX_INT64 = 2**63 - 1
MAX_UNIX_S = 253_402_300_799  # the end of year 9999
MAX_NAME_CHARS = 128
# A secret that is replaced ends after this at the latest.
MAX_OVERLAP_S = 90 * 86_400
# What a key may be for; a key without scopes may serve requests and see its usage.
SCOPES = ("inference", "usage", "admin")
MAX_MODELS, MAX_SCOPES, MAX_BLOCKLIST = 256, 32, 1000
_PREFIX_CHARS = len(KEY_START) + 6
_NO_LIMITS = ratelimit_pb2.Limits()
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]*\Z")


def new_api_key() -> str:
    """Draw a key: 256 random bits, 43 URL-safe characters after the start that scanners know."""
    return KEY_START + secrets.token_urlsafe(32)


def new_key_id() -> str:
    """Draw the name a key is known by."""
    return "key_" + secrets.token_hex(8)


def new_cache_salt() -> bytes:
    """Draw the secret that keeps a tenant's prefix cache apart from all others'."""
    return secrets.token_bytes(CACHE_SALT_BYTES)


def hash_api_key(api_key: str) -> bytes:
    """Return what is stored instead of the key. Plain SHA-256 will do for 256 random bits."""
    return hashlib.sha256(api_key.encode()).digest()


def prefix_of(api_key: str) -> str:
    """Return the first characters, enough to recognise a key by and useless for guessing it."""
    return api_key[:_PREFIX_CHARS]


def is_clean_text(text: str, max_chars: int) -> bool:
    """Tell whether *text* is short enough and free of control characters."""
    if len(text) > max_chars:
        return False
    # Most texts are ids; for those this is a tenth of the pattern's price.
    return (text.isascii() and text.isprintable()) or _PRINTABLE.match(text) is not None


def check_tenant(tenant_id: str, name: str) -> None:
    """Check what a tenant is created from.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_slug(tenant_id, "tenant_id")
    check_text(name, MAX_NAME_CHARS, "name")


def check_key(key: billing_pb2.Key) -> None:
    """Check what a key is created from.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_tenant(key.tenant_id, "")
    if key.project_id:
        check_slug(key.project_id, "key.project_id")
    check_changeable(key)


def check_changeable(key: billing_pb2.Key) -> None:
    """Check the fields that `UpdateKey` replaces.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_text(key.name, MAX_NAME_CHARS, "key.name")
    check_text(key.guard_policy, 64, "key.guard_policy")
    check_list(key.allowed_models, MAX_MODELS, 128, "key.allowed_models")
    check_list(key.guard_blocklist, MAX_BLOCKLIST, 200, "key.guard_blocklist")
    if key.expires_unix_s > MAX_UNIX_S:
        raise InvalidRequest("expires_unix_s lies after the year 9999.", param="key.expires_unix_s")
    if key.priority not in types_pb2.Priority.values():
        raise InvalidRequest("This priority is not known.", param="key.priority")
    check_list(key.scopes, MAX_SCOPES, 64, "key.scopes")
    if unknown := sorted(set(key.scopes) - set(SCOPES)):
        raise InvalidRequest(
            f"scopes may be {', '.join(SCOPES)}, not {', '.join(unknown)}.", param="key.scopes"
        )
    check_limits(key.limits, "key.limits")


@dataclass(frozen=True)
class KeyOwner:
    """What a key inherits from its project, its tenant and the tenant's plan."""

    cache_salt: bytes
    project_limits: ratelimit_pb2.Limits
    tenant_limits: ratelimit_pb2.Limits
    plan: billing_pb2.Plan = field(default_factory=billing_pb2.Plan)
    model_limits: tuple[billing_pb2.ModelLimits, ...] = ()
    is_prepaid: bool = False
    is_suspended: bool = False
    credits_nano_usd: int = 0


def check_usable(key: billing_pb2.Key, owner: KeyOwner, now_unix_s: float) -> None:
    """Check that a known key still opens the door.

    Raises:
        KeyRevoked: it was revoked or has expired, or its tenant is suspended.
    """
    if key.revoked_unix_s:
        raise KeyRevoked("This API key was revoked.")
    if key.expires_unix_s and now_unix_s >= key.expires_unix_s:
        raise KeyRevoked("This API key has expired.")
    if owner.is_suspended:
        raise KeyRevoked("This account is suspended.")


def principal(key: billing_pb2.Key, owner: KeyOwner, revision: int) -> billing_pb2.Principal:
    """Say whom a key stands for. Levels without limits have no scope.

    Nothing is above what the limiter counts: it would refuse the request, not the limit.

    A limit that a key or tenant does not set comes from the plan. A prepaid tenant's balance is
    its total budget: all credits, against all that was ever spent or is held.
    """
    plan = owner.plan
    tenant_limits = _filled(owner.tenant_limits, plan.tenant_limits)
    is_prepaid = owner.is_prepaid or plan.prepaid
    if is_prepaid:
        credits_nano_usd = max(0, owner.credits_nano_usd)
        tenant_limits.total_budget_nano_usd = min(credits_nano_usd, MAX_NANO_USD)
    scopes = (
        (ratelimit_pb2.LEVEL_KEY, key.key_id, _filled(key.limits, plan.key_limits)),
        (ratelimit_pb2.LEVEL_PROJECT, key.project_id, _filled(owner.project_limits, _NO_LIMITS)),
        (ratelimit_pb2.LEVEL_TENANT, key.tenant_id, tenant_limits),
    )
    return billing_pb2.Principal(
        tenant_id=key.tenant_id,
        project_id=key.project_id,
        key_id=key.key_id,
        scopes=key.scopes,
        allowed_models=key.allowed_models or plan.allowed_models,
        limits=[
            ratelimit_pb2.Scope(level=level, scope_id=scope_id, limits=limits)
            for level, scope_id, limits in scopes
            if limits.ListFields()
        ],
        guard_policy=key.guard_policy,
        guard_blocklist=key.guard_blocklist,
        guard_fail_open=key.guard_fail_open,
        cache_salt=owner.cache_salt,
        expires_unix_s=key.expires_unix_s,
        priority=key.priority or plan.priority or types_pb2.PRIORITY_STANDARD,
        prepaid=key.prepaid or is_prepaid,
        counts_cached_input=key.counts_cached_input or plan.counts_cached_input,
        revision=revision,
        model_limits=_model_limits(owner),
    )


def _filled(own: ratelimit_pb2.Limits, plan: ratelimit_pb2.Limits) -> ratelimit_pb2.Limits:
    result = ratelimit_pb2.Limits()
    result.CopyFrom(plan)
    result.MergeFrom(own)
    for descriptor, value in result.ListFields():
        if value > (most := most_of_limit(descriptor.name)):
            setattr(result, descriptor.name, most)
    return result


def _model_limits(owner: KeyOwner) -> list[billing_pb2.ModelLimits]:
    by_model = {it.model: it for it in owner.plan.model_limits}
    by_model |= {it.model: it for it in owner.model_limits}
    return [
        billing_pb2.ModelLimits(model=model, limits=_filled(by_model[model].limits, _NO_LIMITS))
        for model in sorted(by_model)
    ]


def check_slug(value: str, param: str) -> None:
    """Raise unless *value* is a short name.

    Raises:
        InvalidRequest: it is not.
    """
    if not is_slug(value):
        raise InvalidRequest(
            f"{param} must be 1 to 64 of a-z, 0-9, '-' and '_', and start with a letter or digit.",
            param=param,
        )


def check_limits(limits: ratelimit_pb2.Limits, param: str) -> None:
    """Check that the limiter can count so far.

    Raises:
        InvalidRequest: it cannot.
    """
    for descriptor, value in limits.ListFields():
        most = most_of_limit(descriptor.name)
        if value > most:
            raise InvalidRequest(
                f"{descriptor.name} must not exceed {most}.",
                param=f"{param}.{descriptor.name}",
            )


def most_of_limit(name: str) -> int:
    """Return the largest limit of a kind that the limiter counts exactly."""
    return MAX_NANO_USD if name.endswith("_nano_usd") else MAX_RATE_LIMIT


def check_storable(message: Message) -> None:
    """Raise if a number or a text, at whatever depth, is one that no column holds.

    Raises:
        InvalidRequest: it is.
    """
    for descriptor, value in message.ListFields():
        for one in value if descriptor.is_repeated else (value,):
            if isinstance(one, Message):
                check_storable(one)
                continue
            name = descriptor.name
            if isinstance(one, int) and one > MAX_INT64:
                raise InvalidRequest(f"{name} must not exceed {MAX_INT64}.", param=name)
            if isinstance(one, str) and "\x00" in one:
                raise InvalidRequest(f"{name} must hold no NUL characters.", param=name)


def check_text(text: str, max_chars: int, param: str) -> None:
    """Raise unless *text* is short and printable.

    Raises:
        InvalidRequest: it is not.
    """
    if not is_clean_text(text, max_chars):
        raise InvalidRequest(
            f"{param} must have at most {max_chars} characters and no control characters.",
            param=param,
        )


def check_list(values: Iterable[str], max_items: int, max_chars: int, param: str) -> None:
    """Raise unless *values* are few, short, printable and not empty.

    Raises:
        InvalidRequest: they are not.
    """
    items = list(values)
    if len(items) > max_items:
        raise InvalidRequest(f"{param} may hold at most {max_items} items.", param=param)
    for item in items:
        if not item:
            raise InvalidRequest(f"{param} must not hold empty items.", param=param)
        check_text(item, max_chars, param)
