"""Keys: how they are drawn, what they may hold."""

import re

import pytest
from google.protobuf.message import Message

from headrace_billing.key_rules import (
    KeyOwner,
    check_key,
    check_storable,
    check_usable,
    hash_api_key,
    new_api_key,
    prefix_of,
    principal,
)
from headrace_billing.price_rules import check_price
from headrace_common.errors import InvalidRequest, KeyRevoked
from headrace_common.limits.limiter import MAX_NANO_USD, MAX_RATE_LIMIT
from headrace_common.limits.plans import Plans
from headrace_contracts.billing.v1.billing_pb2 import (
    CreateKeyRequest,
    EventId,
    FindMissingRequest,
    Key,
    ModelLimits,
    Price,
    SumUsageRequest,
)
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import (
    LEVEL_KEY,
    LEVEL_MODEL,
    LEVEL_PROJECT,
    LEVEL_TENANT,
    AdmitRequest,
    Limits,
    Scope,
)
from headrace_contracts.types.v1.types_pb2 import PRIORITY_STANDARD

OWNER = KeyOwner(b"s" * 16, Limits(), Limits())


def test_a_key_is_long_random_and_recognisable() -> None:
    """At least 40 URL-safe characters; the prefix gives six of them away."""
    keys = {new_api_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(re.fullmatch(r"sk-hr-[A-Za-z0-9_-]{40,}", key) for key in keys)
    key = keys.pop()
    assert key.startswith(prefix_of(key))
    assert len(prefix_of(key)) == 12
    assert len(hash_api_key(key)) == 32


@pytest.mark.parametrize(
    ("key", "param"),
    [
        (Key(tenant_id=""), "tenant_id"),
        (Key(tenant_id="Acme"), "tenant_id"),
        (Key(tenant_id="a b"), "tenant_id"),
        (Key(tenant_id="a", project_id="../x"), "key.project_id"),
        (Key(tenant_id="a", name="x" * 129), "key.name"),
        (Key(tenant_id="a", name="x\ny"), "key.name"),
        (Key(tenant_id="a", name="nul\x00"), "key.name"),
        (Key(tenant_id="a", scopes=[""]), "key.scopes"),
        (Key(tenant_id="a", allowed_models=["m"] * 257), "key.allowed_models"),
        (Key(tenant_id="a", guard_blocklist=["w" * 201]), "key.guard_blocklist"),
        (Key(tenant_id="a", expires_unix_s=2**60), "key.expires_unix_s"),
        (
            Key(tenant_id="a", limits=Limits(requests_per_minute=2**53)),
            "key.limits.requests_per_minute",
        ),
    ],
)
def test_a_wrong_field_is_named(key: Key, param: str) -> None:
    """Whoever makes a key learns which field to mend."""
    with pytest.raises(InvalidRequest) as caught:
        check_key(key)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("price", "param"),
    [
        (Price(model=""), "price.model"),
        (Price(model="m\x00"), "price.model"),
        (Price(model="m", input_nano_usd=10**9 + 1), "price.input_nano_usd"),
        (Price(model="m", output_nano_usd=2**64 - 1), "price.output_nano_usd"),
        (Price(model="m", effective_from_unix_s=2**62), "price.effective_from_unix_s"),
        (
            Price(model="m", effective_from_unix_s=9, effective_to_unix_s=9),
            "price.effective_to_unix_s",
        ),
    ],
)
def test_a_wrong_price_is_named(price: Price, param: str) -> None:
    """A price that could overflow the books never gets into them."""
    with pytest.raises(InvalidRequest) as caught:
        check_price(price)
    assert caught.value.param == param


def test_only_levels_with_limits_become_scopes() -> None:
    """A budget of 0 is a limit; an absent one is not."""
    owner = KeyOwner(b"s" * 16, Limits(), Limits(day_budget_nano_usd=0))
    key = Key(tenant_id="acme", project_id="p", key_id="k", limits=Limits(max_concurrent=2))
    found = principal(key, owner, 7)
    assert [(it.level, it.scope_id) for it in found.limits] == [
        (LEVEL_KEY, "k"),
        (LEVEL_TENANT, "acme"),
    ]
    assert found.revision == 7
    assert found.cache_salt == b"s" * 16
    everything = KeyOwner(b"", Limits(max_concurrent=1), Limits(max_concurrent=1))
    levels = [it.level for it in principal(key, everything, 1).limits]
    assert levels == [LEVEL_KEY, LEVEL_PROJECT, LEVEL_TENANT]


def test_a_key_without_limits_has_no_scopes_and_standard_priority() -> None:
    """Unspecified is read as standard."""
    found = principal(Key(tenant_id="acme", key_id="k"), OWNER, 1)
    assert not found.limits
    assert found.priority == PRIORITY_STANDARD


def test_a_key_ends_at_its_last_second() -> None:
    """Expired and revoked keys say so."""
    key = Key(expires_unix_s=100)
    check_usable(key, OWNER, 99.9)
    with pytest.raises(KeyRevoked, match="expired"):
        check_usable(key, OWNER, 100.0)
    with pytest.raises(KeyRevoked, match="revoked"):
        check_usable(Key(revoked_unix_s=5), OWNER, 1.0)


def test_nothing_is_above_what_the_limiter_counts() -> None:
    """It would refuse every request of such a key: new limits are refused, old ones cut."""
    key = Key(tenant_id="t", project_id="p", key_id="k")
    key.limits.requests_per_minute = MAX_RATE_LIMIT + 1
    with pytest.raises(InvalidRequest) as caught:
        check_key(key)
    assert caught.value.param == "key.limits.requests_per_minute"
    owner = KeyOwner(
        b"",
        project_limits=Limits(month_budget_nano_usd=2**62),
        tenant_limits=Limits(),
        model_limits=(ModelLimits(model="m", limits=Limits(tokens_per_minute=2**62)),),
        is_prepaid=True,
        credits_nano_usd=2**62,
    )
    found = principal(key, owner, 1)
    of_model = Scope(level=LEVEL_MODEL, scope_id="t/m", limits=found.model_limits[0].limits)
    request = AdmitRequest(
        tenant_id="t", lease_id="l", lease_ms=1, scopes=[*found.limits, of_model]
    )
    limits = [it.limit for it in Plans().of(request).charges.charges]
    assert limits == [MAX_RATE_LIMIT, MAX_NANO_USD, MAX_NANO_USD, MAX_RATE_LIMIT]


@pytest.mark.parametrize(
    "message",
    [
        SumUsageRequest(to_unix_s=2**63),
        CreateKeyRequest(key=Key(expires_unix_s=2**63)),
        SumUsageRequest(model="a\x00"),
        CreateKeyRequest(key=Key(scopes=["usage", "\x00"])),
    ],
)
def test_what_no_column_holds_is_refused(message: Message) -> None:
    """At any depth, by name."""
    with pytest.raises(InvalidRequest) as caught:
        check_storable(message)
    assert caught.value.param in ("to_unix_s", "expires_unix_s", "model", "scopes")


def test_what_fits_passes() -> None:
    """Up to the last one, in lists of messages too."""
    check_storable(FindMissingRequest(events=[EventId(request_id="r"), EventId()]))
    check_storable(SumUsageRequest(to_unix_s=2**63 - 1))
