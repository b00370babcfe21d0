"""The whole service as a process: starts without its dependencies, drains, keeps what it knew."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_billing.key_rules import hash_api_key
from headrace_billing.settings import BillingSettings
from headrace_common import kafka_client
from headrace_common.errors import Unavailable
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_common.settings import SettingsError
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_testing.servers import LocalServer
from headrace_testing.usage_events import AMOUNT_NANO_USD, closed, opened
from headrace_testing.waiting import eventually, free_port
from headrace_testing.web import fetch

KEYS, ADMIN, LEDGER = (pb.DESCRIPTOR.services_by_name[it] for it in ("Keys", "Admin", "Ledger"))
RESOLVE = method_ref(KEYS, "ResolveKey", pb.ResolveKeyRequest, pb.Principal)
CREATE_KEY = method_ref(ADMIN, "CreateKey", pb.CreateKeyRequest, pb.CreateKeyResponse)
VERIFY = method_ref(LEDGER, "Verify", pb.VerifyRequest, pb.VerifyResponse)
LIST_USAGE = method_ref(LEDGER, "ListUsage", pb.ListUsageRequest, pb.ListUsageResponse)


class Process:
    """A billing process on known ports."""

    def __init__(self, **settings: str) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "HEADRACE_BILLING_LISTEN": f"127.0.0.1:{self.port}",
            "HEADRACE_BILLING_METRICS_LISTEN": f"127.0.0.1:{self.metrics_port}",
            **{f"HEADRACE_BILLING_{name}": value for name, value in settings.items()},
        }
        self.client = SessionClient(f"127.0.0.1:{self.port}")

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace_billing", env=self.environment
        )

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 20)

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(fetch, f"http://127.0.0.1:{self.metrics_port}{path}")

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            return (await self.get("/ready"))[0] == 200

        await eventually(is_ready, within_s=40, every_s=0.1)


@contextlib.asynccontextmanager
async def running(**settings: str) -> AsyncIterator[Process]:
    """Run billing for the time of the block; it must end with code 0."""
    process = Process(**settings)
    await process.start()
    try:
        yield process
        await process.client.close()
        assert await process.stop() == 0
    finally:
        if process.process.returncode is None:
            process.process.kill()
            await process.process.wait()


@pytest.mark.kafka
async def test_events_from_the_broker_end_up_in_the_books_for_good(
    own_kafka: LocalServer, tmp_path: Path
) -> None:
    """Keys and ledger are there again after a restart; SIGTERM ends it with code 0."""
    bootstrap = f"127.0.0.1:{own_kafka.port}"
    settings = {
        "DATABASE_URL": f"sqlite:///{tmp_path}/ledger.db",
        "KAFKA_BOOTSTRAP": bootstrap,
    }
    wanted = pb.CreateKeyRequest(key=pb.Key(tenant_id="acme"))
    async with running(**settings) as billing:
        await billing.until_ready()
        made = await billing.client.unary(CREATE_KEY, wanted, timeout_s=5)
        await kafka_client.ensure_topics(bootstrap, [kafka_client.USAGE_TOPIC])
        producer = kafka_client.producer(bootstrap, "test")
        await producer.start()
        for event in (opened(), closed()):
            await producer.send(kafka_client.USAGE_TOPIC, event.SerializeToString(), key=b"acme")
        await producer.stop()

        async def booked() -> bool:
            found = await billing.client.unary(VERIFY, pb.VerifyRequest(), timeout_s=5)
            return found.num_entries == 1

        await eventually(booked, within_s=20)
        _, metrics = await billing.get("/metrics")
        assert 'headrace_billing_events_booked_total{kind="closed",source="log"} 1.0' in metrics
    own_kafka.kill()
    async with running(**settings) as billing:
        await billing.until_ready()
        request = pb.ResolveKeyRequest(key_sha256=hash_api_key(made.api_key))
        found = await billing.client.unary(RESOLVE, request, timeout_s=5)
        assert found.key_id == made.key.key_id
        usage = await billing.client.unary(
            LIST_USAGE, pb.ListUsageRequest(tenant_id="acme"), timeout_s=5
        )
        assert usage.total_nano_usd == AMOUNT_NANO_USD


async def test_it_starts_without_its_database_and_is_ready_when_that_comes(tmp_path: Path) -> None:
    """Alive, not ready, and honest to callers meanwhile."""
    folder = tmp_path / "late"
    async with running(
        DATABASE_URL=f"sqlite:///{folder}/ledger.db",
        KAFKA_BOOTSTRAP=f"127.0.0.1:{free_port()}",
    ) as billing:

        async def status(path: str, code: int) -> bool:
            return (await billing.get(path))[0] == code

        await eventually(lambda: status("/health", 200), within_s=30, every_s=0.1)
        assert await status("/ready", 503)
        with pytest.raises(Unavailable):
            await billing.client.unary(VERIFY, pb.VerifyRequest(), timeout_s=10)
        folder.mkdir()
        await billing.until_ready()
        found = await billing.client.unary(VERIFY, pb.VerifyRequest(), timeout_s=5)
        assert found.ok


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["DATABASE_URL", "KAFKA_BOOTSTRAP"]),
        ({"DATABASE_URL": "sqlite://", "KAFKA_BOOTSTRAP": "h:1"}, ["SQLite file"]),
        ({"DATABASE_URL": "sqlite:////tmp/x", "KAFKA_BOOTSTRAP": "h:1", "X": "1"}, ["BILLING_X"]),
        (
            {
                "DATABASE_URL": "sqlite:////tmp/x",
                "KAFKA_BOOTSTRAP": "h:1",
                "PRICES_FILE": "/nowhere.toml",
            },
            ["/nowhere.toml"],
        ),
    ],
    ids=["nothing set", "memory database", "unknown setting", "no price file"],
)
async def test_a_wrong_setting_ends_the_start_with_its_name(
    settings: dict[str, str], words: list[str]
) -> None:
    """Exit code 2 and one clear line."""
    process = Process(**settings)
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace_billing",
        env=process.environment,
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await asyncio.wait_for(started.communicate(), 60)
    assert started.returncode == 2
    last_line = error.decode().strip().splitlines()[-1]
    assert all(word in last_line for word in words), error.decode()


def test_a_password_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database URL is a secret; settings out of bounds are refused."""
    monkeypatch.setenv("HEADRACE_BILLING_DATABASE_URL", "postgresql+psycopg://u:pass@h/x")
    monkeypatch.setenv("HEADRACE_BILLING_KAFKA_BOOTSTRAP", "h:9092")
    assert "pass" not in repr(BillingSettings.load())
    with pytest.raises(SettingsError, match="SWEEP_GRACE_S"):
        BillingSettings.load(sweep_grace_s=-1)
