"""Billing asks a real guard which policies there are before a key may name one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace_billing.server import BillingServer
from headrace_billing.settings import BillingSettings
from headrace_common.errors import InvalidRequest, Unavailable
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_guard.server import GuardApp
from headrace_guard.settings import GuardSettings
from headrace_testing.clock import FakeClock
from headrace_testing.waiting import eventually, free_port

ADMIN = pb.DESCRIPTOR.services_by_name["Admin"]
CREATE_KEY = method_ref(ADMIN, "CreateKey", pb.CreateKeyRequest, pb.CreateKeyResponse)
UPDATE_KEY = method_ref(ADMIN, "UpdateKey", pb.UpdateKeyRequest, pb.Key)
LIST_KEYS = method_ref(ADMIN, "ListKeys", pb.ListKeysRequest, pb.ListKeysResponse)


@contextlib.asynccontextmanager
async def running_billing(
    guard_address: str, clock: FakeClock, tmp_path: Path
) -> AsyncIterator[Billing]:
    """Billing that looks for the guard at this address."""
    settings = BillingSettings(
        database_url=f"sqlite:///{tmp_path}/ledger.db",
        kafka_bootstrap=f"127.0.0.1:{free_port()}",
        guard_address=guard_address,
    )
    server = BillingServer(settings, CollectorRegistry(), clock)
    await server.start()
    client = SessionClient(f"127.0.0.1:{server.port}")
    await eventually(lambda: server.is_ready, within_s=30)
    yield Billing(client)
    await client.close()
    await server.stop(0)


class Billing:
    """Shortcuts for the calls that write keys."""

    def __init__(self, client: SessionClient) -> None:
        self._client = client

    async def create(self, guard_policy: str) -> pb.Key:
        request = pb.CreateKeyRequest(key=pb.Key(tenant_id="acme", guard_policy=guard_policy))
        return (await self._client.unary(CREATE_KEY, request, timeout_s=10)).key

    async def update(self, key_id: str, guard_policy: str) -> pb.Key:
        key = pb.Key(key_id=key_id, guard_policy=guard_policy)
        request = pb.UpdateKeyRequest(key=key, fields=["guard_policy"])
        return await self._client.unary(UPDATE_KEY, request, timeout_s=10)

    async def policies(self) -> list[str]:
        request = pb.ListKeysRequest(tenant_id="acme")
        answer = await self._client.unary(LIST_KEYS, request, timeout_s=10)
        return [it.guard_policy for it in answer.keys]


async def test_a_key_names_only_policies_that_the_guard_has(
    clock: FakeClock, tmp_path: Path
) -> None:
    """Neither a new key nor a changed one; the answer names those there are."""
    guard = GuardApp(GuardSettings(policy_dir=tmp_path / "policies", drain_grace_s=0))
    await guard.start()
    async with running_billing(f"127.0.0.1:{guard.port}", clock, tmp_path) as billing:
        made = await billing.create("strict")
        with pytest.raises(InvalidRequest, match=r"'nope'; there are .*strict") as refused:
            await billing.create("nope")
        assert refused.value.param == "key.guard_policy"
        with pytest.raises(InvalidRequest, match="'nope'"):
            await billing.update(made.key_id, "nope")
        assert await billing.policies() == ["strict"]
        assert (await billing.update(made.key_id, "off")).guard_policy == "off"
    await guard.stop()


async def test_without_a_guard_no_key_can_name_a_policy(clock: FakeClock, tmp_path: Path) -> None:
    """An unchecked name might be none; keys that name none are made all the same."""
    async with running_billing(f"127.0.0.1:{free_port()}", clock, tmp_path) as billing:
        with pytest.raises(Unavailable, match="guard cannot be asked"):
            await billing.create("strict")
        assert (await billing.create("")).guard_policy == ""
        assert await billing.policies() == [""]
