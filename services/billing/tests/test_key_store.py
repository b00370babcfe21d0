"""Keys in SQL: only hashes, an audit, limits of three levels, last use."""

import json

import pytest
from google.protobuf import json_format
from sqlalchemy import Connection, select, update

from headrace_billing import key_store, schema
from headrace_billing.audit import Stamp
from headrace_billing.key_rules import hash_api_key, principal
from headrace_billing.keys_service import LastUsed
from headrace_billing.revisions import changes_since
from headrace_billing.store import Database
from headrace_common.errors import Unavailable
from headrace_contracts.billing.v1.billing_pb2 import CreateKeyResponse, Key
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import (
    LEVEL_KEY,
    LEVEL_PROJECT,
    LEVEL_TENANT,
    Limits,
)


async def create(database: Database, **fields: object) -> CreateKeyResponse:
    wanted = Key(**{"tenant_id": "acme", **fields})  # type: ignore[arg-type]
    return await database.write(lambda it: key_store.create_key(it, wanted, Stamp(100)))


async def test_a_key_is_stored_nowhere(database: Database) -> None:
    """Not in any column of any table; only its hash and prefix."""
    made = await create(database, name="ci")

    def everything(connection: Connection) -> str:
        tables = schema.metadata.sorted_tables
        return str([connection.execute(select(table)).all() for table in tables])

    content = await database.read(everything)
    assert made.key.prefix in content
    assert made.api_key not in content
    assert made.api_key[len(made.key.prefix) :] not in content
    assert str(hash_api_key(made.api_key)) in content


async def test_limits_of_all_levels_reach_the_principal(database: Database) -> None:
    """Key, project and tenant, in this order."""
    made = await create(database, limits=Limits(max_concurrent=1))

    def limit(connection: Connection) -> None:
        for table, number in ((schema.projects, 2), (schema.tenants, 3)):
            text = json_format.MessageToJson(Limits(max_concurrent=number))
            connection.execute(update(table).values(limits=text))

    await database.write(limit)
    known = await database.read(
        lambda it: key_store.find_by_hash(it, hash_api_key(made.api_key), 0)
    )
    assert known is not None
    scopes = principal(known.key, known.owner, known.revision).limits
    assert [(it.level, it.limits.max_concurrent) for it in scopes] == [
        (LEVEL_KEY, 1),
        (LEVEL_PROJECT, 2),
        (LEVEL_TENANT, 3),
    ]


async def test_every_change_is_audited(database: Database) -> None:
    """What was done to whom and how, without any secret."""
    made = await create(database, name="ci", limits=Limits(requests_per_minute=5))
    change = Key(key_id=made.key.key_id, name="later")
    await database.write(lambda it: key_store.update_key(it, change, Stamp(200)))
    await database.write(lambda it: key_store.revoke_key(it, made.key.key_id, Stamp(300)))
    await database.write(lambda it: key_store.revoke_key(it, made.key.key_id, Stamp(400)))
    query = select(schema.audit).order_by(schema.audit.c.audit_id)
    rows = (await database.read(lambda it: it.execute(query).all()))[1:]
    assert [(row.at_unix_s, row.action, row.subject) for row in rows] == [
        (100, "create_tenant", "acme"),
        (100, "create_project", "acme/default"),
        (100, "create_key", made.key.key_id),
        (200, "update_key", made.key.key_id),
        (300, "revoke_key", made.key.key_id),
    ]
    assert json.loads(rows[2].detail)["limits"] == {"requests_per_minute": "5"}
    assert made.api_key not in str(rows)


async def test_each_change_takes_the_next_revision(database: Database) -> None:
    """A revoked key appears in what changed since; an unchanged one does not."""
    one, two = await create(database), await create(database)
    before = await database.read(lambda it: changes_since(it, -1))
    assert set(before.key_ids) == {one.key.key_id, two.key.key_id}
    nothing = await database.read(lambda it: changes_since(it, before.revision))
    assert (nothing.key_ids, nothing.prices) == ((), False)
    await database.write(lambda it: key_store.revoke_key(it, two.key.key_id, Stamp(1)))
    after = await database.read(lambda it: changes_since(it, before.revision))
    assert after.key_ids == (two.key.key_id,)
    assert after.revision == before.revision + 1


async def test_last_use_is_written_later_and_never_goes_back(database: Database) -> None:
    """It is no change of the key: the revision stays."""
    made = await create(database)
    last_used = LastUsed(database)
    before = await database.read(lambda it: changes_since(it, -1))
    for used_unix_s in (500.7, 400.0):
        last_used.note(made.key.key_id, used_unix_s)
        await last_used.flush()
    (key,) = await database.read(lambda it: key_store.list_keys(it, "acme"))
    assert key.last_used_unix_s == 500
    assert await database.read(lambda it: changes_since(it, -1)) == before


async def test_last_use_is_not_lost_while_the_database_is_away(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays remembered until it can be written."""
    made = await create(database)
    last_used = LastUsed(database)
    last_used.note(made.key.key_id, 500)

    async def fail(_work: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(database, "write", fail)
        with pytest.raises(Unavailable):
            await last_used.flush()
    await last_used.flush()
    (key,) = await database.read(lambda it: key_store.list_keys(it, ""))
    assert key.last_used_unix_s == 500
