"""Keys in SQL. Every change takes the next revision, in the order of commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, insert, select, update

from headrace_billing import schema
from headrace_billing.audit import Stamp, write_audit
from headrace_billing.credit_store import credits_of
from headrace_billing.key_rules import (
    DEFAULT_PROJECT,
    MAX_OVERLAP_S,
    KeyOwner,
    check_changeable,
    check_key,
    hash_api_key,
    is_clean_text,
    new_api_key,
    new_key_id,
    prefix_of,
)
from headrace_billing.revisions import bump_revision, current_revision
from headrace_billing.tenant_store import ensure_project, ensure_tenant, to_json
from headrace_common.errors import InvalidRequest, NotFound
from headrace_contracts.billing.v1.billing_pb2 import CreateKeyResponse, Key, Plan, Tenant
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits

_keys, _tenants, _projects = schema.api_keys, schema.tenants, schema.projects
# Kept in columns, so not in the record.
_COLUMNS = (
    "key_id",
    "tenant_id",
    "project_id",
    "created_unix_s",
    "revoked_unix_s",
    "last_used_unix_s",
    "overlap_until_unix_s",
)
CHANGEABLE = (
    "name",
    "allowed_models",
    "limits",
    "guard_policy",
    "guard_blocklist",
    "guard_fail_open",
    "expires_unix_s",
)
# Only when named.
_CHANGEABLE_BY_NAME = ("scopes", "priority", "prepaid", "counts_cached_input")


@dataclass(frozen=True)
class KnownKey:
    """A key as `ResolveKey` needs it."""

    key: Key
    owner: KeyOwner
    revision: int


def create_key(connection: Connection, wanted: Key, by: Stamp) -> CreateKeyResponse:
    """Draw a key and store its hash.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_key(wanted)
    ensure_tenant(connection, wanted.tenant_id, "", by)
    api_key, key = new_api_key(), Key()
    key.CopyFrom(wanted)
    key.key_id, key.prefix = new_key_id(), prefix_of(api_key)
    key.project_id = wanted.project_id or DEFAULT_PROJECT
    key.created_unix_s, key.revoked_unix_s, key.last_used_unix_s = by.unix_s, 0, 0
    key.overlap_until_unix_s = 0
    ensure_project(connection, key.tenant_id, key.project_id, by)
    connection.execute(
        insert(_keys),
        {
            **{name: getattr(key, name) for name in _COLUMNS},
            "key_sha256": hash_api_key(api_key),
            "record": _record(key),
            "revision": bump_revision(connection),
        },
    )
    write_audit(connection, by, "create_key", key.key_id, _record(key))
    return CreateKeyResponse(api_key=api_key, key=key)


def list_keys(connection: Connection, tenant_id: str) -> list[Key]:
    """Keys of one tenant, or of all if empty, in the order they were made."""
    query = select(_keys).order_by(_keys.c.created_unix_s, _keys.c.key_id)
    if tenant_id:
        query = query.where(_keys.c.tenant_id == tenant_id)
    return [_key(row) for row in connection.execute(query)]


def revoke_key(connection: Connection, key_id: str, by: Stamp) -> Key:
    """End a key for ever. A second time changes nothing.

    Raises:
        NotFound: no such key.
    """
    revision = bump_revision(connection)
    key = _find(connection, key_id)
    if key.revoked_unix_s:
        return key
    key.revoked_unix_s = by.unix_s
    connection.execute(
        update(_keys)
        .where(_keys.c.key_id == key_id)
        .values(revoked_unix_s=by.unix_s, revision=revision)
    )
    write_audit(connection, by, "revoke_key", key_id, "")
    return key


def update_key(connection: Connection, wanted: Key, by: Stamp, fields: Sequence[str] = ()) -> Key:
    """Replace what `UpdateKey` may replace: the named fields, or all that it replaces unnamed.

    Raises:
        InvalidRequest: a field breaks its rule, or cannot be changed.
        NotFound: no such key.
    """
    allowed = (*CHANGEABLE, *_CHANGEABLE_BY_NAME)
    if unknown := sorted(set(fields) - set(allowed)):
        raise InvalidRequest(f"Cannot be changed: {', '.join(unknown)}.", param="fields")
    check_changeable(wanted)
    revision = bump_revision(connection)
    key = _find(connection, wanted.key_id)
    for name in fields or CHANGEABLE:
        key.ClearField(name)  # type: ignore[arg-type]  # a name of the tuples above
        key.MergeFrom(Key(**{name: getattr(wanted, name)}))
    _write(connection, key, revision)
    write_audit(connection, by, "update_key", key.key_id, _record(key))
    return key


def set_key_limits(connection: Connection, key_id: str, limits: Limits, by: Stamp) -> int:
    """Replace the limits of a key; return the revision.

    Raises:
        NotFound: no such key.
    """
    update_key(connection, Key(key_id=key_id, limits=limits), by, ("limits",))
    return current_revision(connection)


def rotate_key(connection: Connection, key_id: str, overlap_s: int, by: Stamp) -> CreateKeyResponse:
    """Draw a new secret for a key; the one before opens the door for *overlap_s* longer.

    Raises:
        InvalidRequest: the key is revoked, or the overlap is too long.
        NotFound: no such key.
    """
    if overlap_s > MAX_OVERLAP_S:
        raise InvalidRequest(f"overlap_s must not exceed {MAX_OVERLAP_S}.", param="overlap_s")
    revision = bump_revision(connection)
    key = _find(connection, key_id)
    if key.revoked_unix_s:
        raise InvalidRequest("A revoked key cannot be rotated.", param="key_id")
    api_key = new_api_key()
    key.prefix, key.overlap_until_unix_s = prefix_of(api_key), by.unix_s + overlap_s
    connection.execute(
        update(_keys)
        .where(_keys.c.key_id == key_id)
        .values(
            old_key_sha256=_keys.c.key_sha256 if overlap_s else None,
            key_sha256=hash_api_key(api_key),
            overlap_until_unix_s=key.overlap_until_unix_s,
        )
    )
    _write(connection, key, revision)
    write_audit(connection, by, "rotate_key", key_id, f"overlap {overlap_s} s")
    return CreateKeyResponse(api_key=api_key, key=key)


def find_by_hash(connection: Connection, key_sha256: bytes, now_unix_s: float) -> KnownKey | None:
    """Return the key with this hash and what it inherits. An old secret ends with its overlap."""
    is_its = (_keys.c.key_sha256 == key_sha256) | (_keys.c.old_key_sha256 == key_sha256)
    row = connection.execute(_known(is_its)).one_or_none()
    if row is None:
        return None
    key = _key(row)
    if row.key_sha256 != key_sha256:
        if now_unix_s >= row.overlap_until_unix_s:
            return None
        ends = key.expires_unix_s or key.overlap_until_unix_s
        key.expires_unix_s = min(ends, key.overlap_until_unix_s)
    return KnownKey(key, _owner(connection, row), row.revision)


def find_by_id(connection: Connection, key_id: str) -> KnownKey | None:
    """Return the key and what it inherits, whatever its secret."""
    if not is_clean_text(key_id, 128):
        return None
    row = connection.execute(_known(_keys.c.key_id == key_id)).one_or_none()
    return None if row is None else KnownKey(_key(row), _owner(connection, row), row.revision)


def _known(which: ColumnElement[bool]) -> Select[Any]:  # Any: columns of several tables
    return (
        select(
            _keys,
            _tenants.c.cache_salt,
            _tenants.c.limits.label("tenant_limits"),
            _tenants.c.record.label("tenant_record"),
            _projects.c.limits.label("project_limits"),
            schema.plans.c.record.label("plan_record"),
        )
        .join(_tenants, _tenants.c.tenant_id == _keys.c.tenant_id)
        .join(
            _projects,
            (_projects.c.tenant_id == _keys.c.tenant_id)
            & (_projects.c.project_id == _keys.c.project_id),
        )
        .outerjoin(schema.plans, schema.plans.c.plan_id == _tenants.c.plan_id)
        .where(which)
    )


def _owner(connection: Connection, row: Row[Any]) -> KeyOwner:  # Any: what `_known` selects
    tenant: Tenant = json_format.Parse(row.tenant_record, Tenant(), ignore_unknown_fields=True)
    return KeyOwner(
        cache_salt=row.cache_salt,
        project_limits=json_format.Parse(row.project_limits, Limits()),
        tenant_limits=json_format.Parse(row.tenant_limits, Limits()),
        plan=json_format.Parse(row.plan_record or "{}", Plan(), ignore_unknown_fields=True),
        model_limits=tuple(tenant.model_limits),
        is_prepaid=tenant.prepaid,
        is_suspended=tenant.suspended,
        credits_nano_usd=credits_of(connection, row.tenant_id),
    )


def write_last_used(connection: Connection, used_unix_s: dict[str, int]) -> None:
    """Note when keys were last used. Not a change: the revision stays."""
    if not used_unix_s:
        return
    newer = (
        update(_keys)
        .where(_keys.c.key_id == bindparam("used_key_id"))
        .where(_keys.c.last_used_unix_s < bindparam("used_unix_s"))
        .values(last_used_unix_s=bindparam("used_unix_s"))
    )
    rows = [{"used_key_id": k, "used_unix_s": used_unix_s[k]} for k in sorted(used_unix_s)]
    connection.execute(newer, rows)


def _find(connection: Connection, key_id: str) -> Key:
    query = select(_keys).where(_keys.c.key_id == key_id)
    row = connection.execute(query).one_or_none() if is_clean_text(key_id, 128) else None
    if row is None:
        raise NotFound(f"There is no key {key_id!r}.", param="key_id")
    return _key(row)


def _write(connection: Connection, key: Key, revision: int) -> None:
    connection.execute(
        update(_keys)
        .where(_keys.c.key_id == key.key_id)
        .values(record=_record(key), revision=revision)
    )


def _record(key: Key) -> str:
    record = Key()
    record.CopyFrom(key)
    for name in _COLUMNS:
        record.ClearField(name)  # type: ignore[arg-type]  # a name of the tuple above
    return to_json(record)


def _key(row: Row[Any]) -> Key:  # Any: columns of api_keys
    key: Key = json_format.Parse(row.record, Key(), ignore_unknown_fields=True)
    key.MergeFrom(Key(**{name: getattr(row, name) for name in _COLUMNS}))
    return key
