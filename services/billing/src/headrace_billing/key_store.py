"""Tenants and keys in SQL. Every change takes the next revision, in the order of commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from sqlalchemy import Connection, Row, bindparam, insert, select, update

from headrace_billing import schema
from headrace_billing.key_rules import (
    DEFAULT_PROJECT,
    KeyOwner,
    check_changeable,
    check_key,
    check_tenant,
    hash_api_key,
    is_clean_text,
    new_api_key,
    new_cache_salt,
    new_key_id,
    prefix_of,
)
from headrace_common.database import insert_new
from headrace_common.errors import NotFound
from headrace_contracts.billing.v1.billing_pb2 import CreateKeyResponse, Key, Tenant
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits

_keys, _tenants, _projects, _meta = (
    schema.api_keys,
    schema.tenants,
    schema.projects,
    schema.meta,
)
# Kept in columns, so not in the record.
_COLUMNS = (
    "key_id",
    "tenant_id",
    "project_id",
    "created_unix_s",
    "revoked_unix_s",
    "last_used_unix_s",
)
_CHANGEABLE = (
    "name",
    "allowed_models",
    "limits",
    "guard_policy",
    "guard_blocklist",
    "guard_fail_open",
    "expires_unix_s",
)


@dataclass(frozen=True)
class KnownKey:
    """A key as `ResolveKey` needs it."""

    key: Key
    owner: KeyOwner
    revision: int


@dataclass(frozen=True)
class Changes:
    """What happened since a revision."""

    revision: int
    key_ids: tuple[str, ...]
    prices: bool


def ensure_tenant(connection: Connection, tenant_id: str, name: str, now_unix_s: int) -> Tenant:
    """Create a tenant with its default project, or return the one there is.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_tenant(tenant_id, name)
    row = {
        "tenant_id": tenant_id,
        "name": name or tenant_id,
        "cache_salt": new_cache_salt(),
        "limits": _to_json(Limits()),
        "created_unix_s": now_unix_s,
    }
    if insert_new(connection, _tenants, [row]):
        write_audit(connection, now_unix_s, "create_tenant", tenant_id, name)
        _ensure_project(connection, tenant_id, DEFAULT_PROJECT, now_unix_s)
    found = connection.execute(select(_tenants).where(_tenants.c.tenant_id == tenant_id)).one()
    return _tenant(found)


def list_tenants(connection: Connection) -> list[Tenant]:
    """All tenants, by id."""
    return [_tenant(row) for row in connection.execute(select(_tenants).order_by("tenant_id"))]


def create_key(connection: Connection, wanted: Key, now_unix_s: int) -> CreateKeyResponse:
    """Draw a key and store its hash.

    Raises:
        InvalidRequest: a field breaks its rule.
    """
    check_key(wanted)
    ensure_tenant(connection, wanted.tenant_id, "", now_unix_s)
    api_key, key = new_api_key(), Key()
    key.CopyFrom(wanted)
    key.key_id, key.prefix = new_key_id(), prefix_of(api_key)
    key.project_id = wanted.project_id or DEFAULT_PROJECT
    key.created_unix_s, key.revoked_unix_s, key.last_used_unix_s = now_unix_s, 0, 0
    _ensure_project(connection, key.tenant_id, key.project_id, now_unix_s)
    connection.execute(
        insert(_keys),
        {
            **{name: getattr(key, name) for name in _COLUMNS},
            "key_sha256": hash_api_key(api_key),
            "record": _record(key),
            "revision": bump_revision(connection),
        },
    )
    write_audit(connection, now_unix_s, "create_key", key.key_id, _record(key))
    return CreateKeyResponse(api_key=api_key, key=key)


def list_keys(connection: Connection, tenant_id: str) -> list[Key]:
    """Keys of one tenant, or of all if empty, in the order they were made."""
    query = select(_keys).order_by(_keys.c.created_unix_s, _keys.c.key_id)
    if tenant_id:
        query = query.where(_keys.c.tenant_id == tenant_id)
    return [_key(row) for row in connection.execute(query)]


def revoke_key(connection: Connection, key_id: str, now_unix_s: int) -> Key:
    """End a key for ever. A second time changes nothing.

    Raises:
        NotFound: no such key.
    """
    revision = bump_revision(connection)
    key = _find(connection, key_id)
    if key.revoked_unix_s:
        return key
    key.revoked_unix_s = now_unix_s
    connection.execute(
        update(_keys)
        .where(_keys.c.key_id == key_id)
        .values(revoked_unix_s=now_unix_s, revision=revision)
    )
    write_audit(connection, now_unix_s, "revoke_key", key_id, "")
    return key


def update_key(connection: Connection, wanted: Key, now_unix_s: int) -> Key:
    """Replace what `UpdateKey` may replace.

    Raises:
        InvalidRequest: a field breaks its rule.
        NotFound: no such key.
    """
    check_changeable(wanted)
    revision = bump_revision(connection)
    key = _find(connection, wanted.key_id)
    for name in _CHANGEABLE:
        key.ClearField(name)  # type: ignore[arg-type]  # a name of the tuple above
    key.MergeFrom(Key(**{name: getattr(wanted, name) for name in _CHANGEABLE}))
    connection.execute(
        update(_keys)
        .where(_keys.c.key_id == key.key_id)
        .values(record=_record(key), revision=revision)
    )
    write_audit(connection, now_unix_s, "update_key", key.key_id, _record(key))
    return key


def find_by_hash(connection: Connection, key_sha256: bytes) -> KnownKey | None:
    """Return the key with this hash and what it inherits."""
    query = (
        select(
            _keys,
            _tenants.c.cache_salt,
            _tenants.c.limits.label("tenant_limits"),
            _projects.c.limits.label("project_limits"),
        )
        .join(_tenants, _tenants.c.tenant_id == _keys.c.tenant_id)
        .join(
            _projects,
            (_projects.c.tenant_id == _keys.c.tenant_id)
            & (_projects.c.project_id == _keys.c.project_id),
        )
        .where(_keys.c.key_sha256 == key_sha256)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    owner = KeyOwner(
        cache_salt=row.cache_salt,
        project_limits=json_format.Parse(row.project_limits, Limits()),
        tenant_limits=json_format.Parse(row.tenant_limits, Limits()),
    )
    return KnownKey(_key(row), owner, row.revision)


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


def changes_since(connection: Connection, revision: int) -> Changes:
    """Tell what has changed after *revision*."""
    counters = dict(connection.execute(select(_meta.c.name, _meta.c.value)).all())
    if counters["revision"] == revision:
        return Changes(revision, (), prices=False)
    key_ids = connection.execute(
        select(_keys.c.key_id).where(_keys.c.revision > revision).order_by(_keys.c.revision)
    ).scalars()
    return Changes(counters["revision"], tuple(key_ids), prices=counters["prices"] > revision)


def bump_revision(connection: Connection, *, also: str | None = None) -> int:
    """Take the next revision; *also* names a counter that is set to it.

    The row stays locked until the transaction ends, so revisions appear in the order of commits.
    """
    following = update(_meta).where(_meta.c.name == "revision").values(value=_meta.c.value + 1)
    revision: int = connection.execute(following.returning(_meta.c.value)).scalar_one()
    if also is not None:
        connection.execute(update(_meta).where(_meta.c.name == also).values(value=revision))
    return revision


def write_audit(
    connection: Connection, now_unix_s: int, action: str, subject: str, detail: str
) -> None:
    """Write down who is changed and how."""
    connection.execute(
        insert(schema.audit),
        {"at_unix_s": now_unix_s, "action": action, "subject": subject, "detail": detail},
    )


def _ensure_project(
    connection: Connection, tenant_id: str, project_id: str, now_unix_s: int
) -> None:
    row = {
        "tenant_id": tenant_id,
        "project_id": project_id,
        "limits": _to_json(Limits()),
        "created_unix_s": now_unix_s,
    }
    insert_new(connection, _projects, [row])


def _find(connection: Connection, key_id: str) -> Key:
    query = select(_keys).where(_keys.c.key_id == key_id)
    row = connection.execute(query).one_or_none() if is_clean_text(key_id, 128) else None
    if row is None:
        raise NotFound(f"There is no key {key_id!r}.", param="key_id")
    return _key(row)


def _record(key: Key) -> str:
    record = Key()
    record.CopyFrom(key)
    for name in _COLUMNS:
        record.ClearField(name)  # type: ignore[arg-type]  # a name of the tuple above
    return _to_json(record)


def _to_json(message: Key | Limits) -> str:
    return json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None)


def _key(row: Row[Any]) -> Key:  # Any: columns of api_keys
    key: Key = json_format.Parse(row.record, Key(), ignore_unknown_fields=True)
    key.MergeFrom(Key(**{name: getattr(row, name) for name in _COLUMNS}))
    return key


def _tenant(row: Row[Any]) -> Tenant:  # Any: columns of tenants
    return Tenant(tenant_id=row.tenant_id, name=row.name, created_unix_s=row.created_unix_s)
