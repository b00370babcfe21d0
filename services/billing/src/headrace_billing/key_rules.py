"""Rules of API keys, without storage: how they are drawn, what they hold, whom they stand for."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from headrace_billing.prices import MAX_NANO_USD_PER_TOKEN, standard_tier
from headrace_common.errors import InvalidRequest, KeyRevoked
from headrace_common.ids import is_slug
from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_contracts.types.v1 import types_pb2
from headrace_contracts.usage.v1 import usage_pb2

KEY_START = "sk-hr-"
DEFAULT_PROJECT = "default"
CACHE_SALT_BYTES = 16
HASH_BYTES = 32
# The limiter counts in Lua numbers: whole only up to here.
MAX_LIMIT = 2**53 - 1
MAX_UNIX_S = 253_402_300_799  # the end of year 9999
MAX_NAME_CHARS = 128
MAX_MODELS, MAX_SCOPES, MAX_BLOCKLIST = 256, 32, 1000
_PREFIX_CHARS = len(KEY_START) + 6
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
    return len(text) <= max_chars and _PRINTABLE.match(text) is not None


def check_tenant(tenant_id: str, name: str) -> None:
    """Check what a tenant is created from.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    if not is_slug(tenant_id):
        raise InvalidRequest(
            "tenant_id must be 1 to 64 of a-z, 0-9, '-' and '_', and start with a letter or digit.",
            param="tenant_id",
        )
    _check_text(name, MAX_NAME_CHARS, "name")


def check_key(key: billing_pb2.Key) -> None:
    """Check what a key is created from.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_tenant(key.tenant_id, "")
    if key.project_id and not is_slug(key.project_id):
        raise InvalidRequest("project_id must be like a tenant_id.", param="key.project_id")
    if key.priority not in types_pb2.Priority.values():
        raise InvalidRequest("This priority is not known.", param="key.priority")
    _check_list(key.scopes, MAX_SCOPES, 64, "key.scopes")
    check_changeable(key)


def check_changeable(key: billing_pb2.Key) -> None:
    """Check the fields that `UpdateKey` replaces.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    _check_text(key.name, MAX_NAME_CHARS, "key.name")
    _check_text(key.guard_policy, 64, "key.guard_policy")
    _check_list(key.allowed_models, MAX_MODELS, 128, "key.allowed_models")
    _check_list(key.guard_blocklist, MAX_BLOCKLIST, 200, "key.guard_blocklist")
    if key.expires_unix_s > MAX_UNIX_S:
        raise InvalidRequest("expires_unix_s lies after the year 9999.", param="key.expires_unix_s")
    for field, value in key.limits.ListFields():
        if value > MAX_LIMIT:
            raise InvalidRequest(
                f"{field.name} must not exceed {MAX_LIMIT}.", param=f"key.limits.{field.name}"
            )


def check_price(price: billing_pb2.Price) -> None:
    """Check a new price.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    if not price.model:
        raise InvalidRequest("model must name a model, or be 'default'.", param="price.model")
    _check_text(price.model, 128, "price.model")
    if price.tier not in usage_pb2.PriceTier.values():
        raise InvalidRequest("This price tier is not known.", param="price.tier")
    for name in ("effective_from_unix_s", "effective_to_unix_s"):
        if getattr(price, name) > MAX_UNIX_S:
            raise InvalidRequest(f"{name} lies after the year 9999.", param=f"price.{name}")
    if 0 < price.effective_to_unix_s <= price.effective_from_unix_s:
        raise InvalidRequest(
            "effective_to_unix_s must be later than effective_from_unix_s.",
            param="price.effective_to_unix_s",
        )
    for name in ("input", "cached_input", "cache_write", "output"):
        if getattr(price, f"{name}_nano_usd") > MAX_NANO_USD_PER_TOKEN:
            raise InvalidRequest(
                f"{name}_nano_usd must not exceed {MAX_NANO_USD_PER_TOKEN} (1 USD per token).",
                param=f"price.{name}_nano_usd",
            )


def normalised_price(price: billing_pb2.Price, version: int) -> billing_pb2.Price:
    """Return a copy of *price* with its tier spelt out and the version that brings it."""
    result = billing_pb2.Price()
    result.CopyFrom(price)
    result.tier = usage_pb2.PriceTier.ValueType(standard_tier(price.tier))
    result.version = version
    return result


@dataclass(frozen=True)
class KeyOwner:
    """What a key inherits from its project and tenant."""

    cache_salt: bytes
    project_limits: ratelimit_pb2.Limits
    tenant_limits: ratelimit_pb2.Limits


def check_usable(key: billing_pb2.Key, now_unix_s: float) -> None:
    """Check that a known key still opens the door.

    Raises:
        KeyRevoked: it was revoked or has expired.
    """
    if key.revoked_unix_s:
        raise KeyRevoked("This API key was revoked.")
    if key.expires_unix_s and now_unix_s >= key.expires_unix_s:
        raise KeyRevoked("This API key has expired.")


def principal(key: billing_pb2.Key, owner: KeyOwner, revision: int) -> billing_pb2.Principal:
    """Say whom a key stands for. Levels without limits have no scope."""
    scopes = (
        (ratelimit_pb2.LEVEL_KEY, key.key_id, key.limits),
        (ratelimit_pb2.LEVEL_PROJECT, key.project_id, owner.project_limits),
        (ratelimit_pb2.LEVEL_TENANT, key.tenant_id, owner.tenant_limits),
    )
    return billing_pb2.Principal(
        tenant_id=key.tenant_id,
        project_id=key.project_id,
        key_id=key.key_id,
        scopes=key.scopes,
        allowed_models=key.allowed_models,
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
        priority=key.priority or types_pb2.PRIORITY_STANDARD,
        prepaid=key.prepaid,
        counts_cached_input=key.counts_cached_input,
        revision=revision,
    )


def _check_text(text: str, max_chars: int, param: str) -> None:
    if not is_clean_text(text, max_chars):
        raise InvalidRequest(
            f"{param} must have at most {max_chars} characters and no control characters.",
            param=param,
        )


def _check_list(values: object, max_items: int, max_chars: int, param: str) -> None:
    items = list(values)  # type: ignore[call-overload]  # protobuf's repeated field
    if len(items) > max_items:
        raise InvalidRequest(f"{param} may hold at most {max_items} items.", param=param)
    for item in items:
        if not item:
            raise InvalidRequest(f"{param} must not hold empty items.", param=param)
        _check_text(item, max_chars, param)
