"""The revision of keys, limits and prices: every change takes the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select, update

from headrace_billing import schema

_keys, _meta = schema.api_keys, schema.meta


@dataclass(frozen=True)
class Changes:
    """What happened since a revision."""

    revision: int
    key_ids: tuple[str, ...]
    prices: bool


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


def current_revision(connection: Connection) -> int:
    """Return the newest revision."""
    query = select(_meta.c.value).where(_meta.c.name == "revision")
    revision: int = connection.execute(query).scalar_one()
    return revision


def touch_keys(connection: Connection, tenant_ids: Sequence[str]) -> int:
    """Tell watchers that the keys of these tenants stand for something else now."""
    revision = bump_revision(connection)
    connection.execute(
        update(_keys).where(_keys.c.tenant_id.in_(tenant_ids)).values(revision=revision)
    )
    return revision
