"""Kills everything between an answer and its entry, at random, and then counts.

Real processes: two gateways with their outboxes and relays, a broker, two billing services that
share the partitions of one database. Fakes speak for what is not under test (workers, router,
guard, limits). Clients stream answers all the while; a meddler sends what the log holds again, in
another order and to other partitions. Every so often one process is killed with SIGKILL and started
again; the broker loses its log each time.

At the end, once everything is up again and quiet, the ledger must hold exactly one entry for every
request that a client saw begin, an independent recount must give its balances, all postings must
sum to zero, and a replay into an empty database must give the same books.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import httpx
from sqlalchemy import Connection, select

from headrace_billing import schema
from headrace_billing.audit import Stamp
from headrace_billing.changes import ChangeFeed
from headrace_billing.desk import Desk
from headrace_billing.key_store import create_key
from headrace_billing.ledger import is_correction
from headrace_billing.reconcile import KafkaLog
from headrace_billing.replay import replay
from headrace_billing.store import Database
from headrace_billing.verify import verify
from headrace_common import kafka_client
from headrace_common.clock import SystemClock
from headrace_common.price_rows import cached_tokens
from headrace_contracts.billing.v1.billing_pb2 import Key
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_testing import servers
from headrace_testing.fake_guard import DESCRIPTOR as GUARD
from headrace_testing.fake_guard import FakeGuard
from headrace_testing.fake_ratelimit import DESCRIPTOR as RATE_LIMIT
from headrace_testing.fake_ratelimit import FakeRateLimit
from headrace_testing.fake_router import DESCRIPTOR as ROUTER
from headrace_testing.fake_router import FakeRouter
from headrace_testing.fake_worker import FakeWorker, FakeWorkerServer
from headrace_testing.gateway_fleet import FakeServer, chat_body
from headrace_testing.waiting import eventually, free_port

_NUM_TENANTS = 4
_REQUEST_TIMEOUT_S, _SWEEP_GRACE_S = 5.0, 3.0
# Nano-USD per token in the packaged table: input, cached input, cache write, output.
_INPUT, _CACHED, _WRITTEN, _OUTPUT = 20, 2, 25, 60


@dataclass
class CrashReport:
    """What was done and what came of it. `problems` must be empty."""

    duration_s: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    cut_off: int = 0
    resent: int = 0
    entries: int = 0
    swept: int = 0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Render for a benchmark's output."""
        return {**asdict(self), "kills": dict(self.kills), "ok": not self.problems}


class Child:
    """A service as a process of its own, on the same ports for all its lives."""

    def __init__(self, module: str, folder: Path, environment: dict[str, str]) -> None:
        self._module, self._folder, self._environment = module, folder, environment
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; it becomes ready by itself."""
        with (self._folder / f"{self._module}.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                env=self._environment,
                stdout=log,
                stderr=log,
                stdin=asyncio.subprocess.DEVNULL,
            )

    async def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class CrashFleet:
    """Everything that runs during a crash test.

    Args:
        folder: for databases, outboxes and logs.
        environment: what children inherit.
        seed: of what is killed when.
    """

    def __init__(self, folder: Path, environment: dict[str, str], seed: int) -> None:
        self._folder, self._environment = folder, environment
        self._random = random.Random(seed)
        self._url = f"sqlite:///{folder}/ledger.sqlite3"
        self._stack = contextlib.AsyncExitStack()
        self._keys: list[str] = []
        self.broker = servers.kafka(folder)
        self.gateways: list[Child] = []
        self.billings: list[Child] = []
        self.ports: list[int] = []
        # Requests whose answer began, as their clients saw it.
        self.begun: set[str] = set()
        self.report = CrashReport()

    @property
    def _bootstrap(self) -> str:
        return f"127.0.0.1:{self.broker.port}"

    async def start(self) -> None:
        """Start everything; return once a gateway answers."""
        self.broker.start()
        self._stack.callback(self.broker.kill)
        await self._make_keys()
        addresses = await self._start_fakes()
        billing_ports = [free_port(), free_port()]
        for port in billing_ports:
            child = self._child("billing", {"LISTEN": f"127.0.0.1:{port}", **self._billing()})
            self.billings.append(child)
        for number, port in enumerate(billing_ports):
            listen = free_port()
            self.ports.append(listen)
            own = {
                "LISTEN": f"127.0.0.1:{listen}",
                "BILLING_ADDRESS": f"127.0.0.1:{port}",
                "OUTBOX_DIR": str(self._folder / f"outbox-{number}"),
                "STATE_URL": f"sqlite:///{self._folder}/state-{number}.sqlite3",
                "KAFKA_BOOTSTRAP": self._bootstrap,
                "REQUEST_TIMEOUT_S": str(_REQUEST_TIMEOUT_S),
                **addresses,
            }
            self.gateways.append(self._child("gateway", own))
        for child in (*self.billings, *self.gateways):
            await child.start()
        for port in self.ports:
            await self._until_ready(port)

    async def run(self, duration_s: float, num_clients: int = 6) -> CrashReport:
        """Serve, kill and meddle for so long, then let everything come to rest and count."""
        started_s = time.monotonic()
        work = [asyncio.create_task(self._client()) for _ in range(num_clients)]
        work += [asyncio.create_task(it()) for it in (self._kill_now_and_then, self._meddle)]
        await asyncio.sleep(duration_s)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await self._restart_everything()
        await self._rest()
        await self._count()
        self.report.duration_s = round(time.monotonic() - started_s, 1)
        return self.report

    async def close(self) -> None:
        """End everything."""
        for child in (*self.gateways, *self.billings):
            await child.kill()
        await self._stack.aclose()

    # --- the parts -----------------------------------------------------------------------

    def _child(self, service: str, own: dict[str, str]) -> Child:
        prefix = f"HEADRACE_{service.upper()}_"
        environment = self._environment | {prefix + name: value for name, value in own.items()}
        return Child(f"headrace_{service}", self._folder, environment)

    def _billing(self) -> dict[str, str]:
        return {
            "DATABASE_URL": self._url,
            "KAFKA_BOOTSTRAP": self._bootstrap,
            "SWEEP_GRACE_S": str(_SWEEP_GRACE_S),
            "SWEEP_INTERVAL_S": "1",
        }

    async def _make_keys(self) -> None:
        database = Database(self._url)
        await database.migrate()
        for number in range(_NUM_TENANTS):
            wanted = Key(tenant_id=f"tenant-{number}", name="crash")
            made = await database.write(partial(create_key, wanted=wanted, by=Stamp(1)))
            self._keys.append(made.api_key)
        await database.close()

    async def _start_fakes(self) -> dict[str, str]:
        router = FakeRouter()
        for number in range(2):
            worker = FakeWorker(worker_id=f"w{number}")
            worker.switches.delay_per_token_s = 0.01
            server = await self._stack.enter_async_context(FakeWorkerServer(worker))
            router.add_worker(worker.worker_id, server.address, [worker.card()])
        addresses = {}
        for name, descriptor, servicer in (
            ("ROUTER", ROUTER, router),
            ("GUARD", GUARD, FakeGuard()),
            ("RATELIMIT", RATE_LIMIT, FakeRateLimit()),
        ):
            fake = await self._stack.enter_async_context(FakeServer(descriptor, servicer))
            addresses[f"{name}_ADDRESS"] = fake.address
        return addresses

    async def _until_ready(self, port: int) -> None:
        async def is_ready() -> int | None:
            with contextlib.suppress(httpx.HTTPError):
                async with httpx.AsyncClient(timeout=2) as http:
                    answer = await http.get(f"http://127.0.0.1:{port}/ready")
                    return 1 if answer.status_code == 200 else None
            return None

        # mypy cannot tell T from Awaitable[T]
        await eventually(is_ready, within_s=180, every_s=0.2)  # type: ignore[arg-type]

    # --- what goes on meanwhile ----------------------------------------------------------

    async def _client(self) -> None:
        while True:
            port, key = self._random.choice(self.ports), self._random.choice(self._keys)
            leaves_early = self._random.random() < 0.2
            try:
                await self._ask(port, key, leaves_early=leaves_early)
            except httpx.HTTPError:
                self.report.cut_off += 1
                await asyncio.sleep(0.1)

    async def _ask(self, port: int, key: str, *, leaves_early: bool) -> None:
        body = chat_body(f"question {self._random.random()}", stream=True, max_tokens=40)
        headers = {"authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with (
            httpx.AsyncClient(timeout=15) as http,
            http.stream("POST", url, json=body, headers=headers) as answer,
        ):
            if answer.status_code != 200:
                await asyncio.sleep(0.1)
                return
            self.begun.add(answer.headers["x-request-id"])
            num_lines = 0
            async for _ in answer.aiter_lines():
                num_lines += 1
                if leaves_early and num_lines > 6:
                    return
            self.report.answered += 1

    async def _kill_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(0.5, 4.0))
            what = self._random.choice(["gateway", "gateway", "billing", "billing", "broker"])
            self.report.kills[what] += 1
            if what == "broker":
                self.broker.kill()
                await asyncio.sleep(self._random.uniform(0.0, 1.0))
                await asyncio.to_thread(self.broker.start)
                continue
            child = self._random.choice(self.gateways if what == "gateway" else self.billings)
            await child.kill()
            await asyncio.sleep(self._random.uniform(0.0, 1.0))
            await child.start()

    async def _meddle(self) -> None:
        """Send what the log holds again, shuffled, to whatever partition."""
        while True:
            await asyncio.sleep(self._random.uniform(1.0, 3.0))
            with contextlib.suppress(Exception):
                await self._resend()

    async def _resend(self) -> None:
        values = [value async for batch in KafkaLog(self._bootstrap).batches() for value in batch]
        self._random.shuffle(values)
        producer = kafka_client.producer(self._bootstrap, "meddler")
        try:
            async with asyncio.timeout(10):
                await producer.start()
                for value in values[:300]:
                    key = str(self._random.random()).encode()
                    await producer.send(kafka_client.USAGE_TOPIC, value, key=key)
                await producer.flush()
            self.report.resent += len(values[:300])
        finally:
            # In a task of its own: with the broker gone it may hang.
            stopping = asyncio.create_task(producer.stop())
            await asyncio.wait({stopping}, timeout=10)

    # --- the end -------------------------------------------------------------------------

    async def _restart_everything(self) -> None:
        self.broker.kill()
        await asyncio.to_thread(self.broker.start)
        for child in (*self.billings, *self.gateways):
            await child.kill()
            await child.start()
        for port in self.ports:
            await self._until_ready(port)

    async def _rest(self) -> None:
        """Wait until every request that was opened is closed."""
        database = Database(self._url)

        async def is_quiet() -> int | None:
            entries, num_open = await database.read(entries_and_open)
            return 1 if num_open == 0 and self.begun <= entries else None

        try:
            await eventually(is_quiet, within_s=90, every_s=0.5)  # type: ignore[arg-type]  # as above
        except AssertionError:
            self.report.problems.append("It did not come to rest within 90 s.")
        await database.close()

    async def _count(self) -> None:
        database = Database(self._url)
        try:
            await self._compare(database)
        finally:
            await database.close()

    async def _compare(self, database: Database) -> None:
        report = self.report
        entries, num_open = await database.read(entries_and_open)
        report.entries = len(entries)
        if num_open:
            report.problems.append(f"{num_open} requests are open.")
        if missing := sorted(self.begun - entries):
            report.problems.append(f"{len(missing)} requests have no entry, e.g. {missing[:3]}.")
        recount, report.swept, problems = await database.read(recount_independently)
        report.problems += problems
        stored = await database.read(balances)
        if recount != {name: amount for name, amount in stored.items() if amount}:
            report.problems.append(f"Balances are {stored}, the recount is {recount}.")
        if sum(stored.values()):
            report.problems.append(f"All balances sum to {sum(stored.values())}.")
        found = await database.read(verify)
        if not found.ok or found.postings_sum_nano_usd:
            report.problems += list(found.problems)
        again = await replay(Desk(database, ChangeFeed(database), SystemClock(), kept_days=1))
        report.problems += list(again.problems)


def entries_and_open(connection: Connection) -> tuple[set[str], int]:
    """Return the requests that have an entry, and how many are open."""
    ids = connection.execute(select(schema.entries.c.request_id)).scalars()
    entries = {it for it in ids if not is_correction(it)}
    open_ids = connection.execute(select(schema.open_requests.c.request_id)).scalars().all()
    return entries, len(open_ids)


def balances(connection: Connection) -> dict[str, int]:
    """Return the stored balances."""
    return {row.account: row.amount_nano_usd for row in connection.execute(select(schema.balances))}


def recount_independently(connection: Connection) -> tuple[dict[str, int], int, list[str]]:
    """Add up the events by plain arithmetic, without the ledger's code.

    Returns:
        The balances above zero and below, how many requests were swept, what is wrong.
    """
    totals: Counter[str] = Counter()
    kinds: Counter[tuple[str, int]] = Counter()
    swept, problems = 0, []
    for row in connection.execute(select(schema.usage_events)):
        event = UsageEvent.FromString(row.payload)
        kinds[event.request_id, event.kind] += 1
        if event.kind != UsageEvent.KIND_CLOSED:
            continue
        swept += row.source == "sweeper"
        classes = _amounts(event.usage)
        if event.HasField("replaces"):
            before = _amounts(event.replaces)
            classes = {name: amount - before[name] for name, amount in classes.items()}
        totals[f"receivable:{event.tenant_id}"] += sum(classes.values())
        for name, amount in classes.items():
            totals[f"revenue:{event.model}:{name}"] -= amount
    problems += [
        f"Event {key} is there {count} times." for key, count in kinds.items() if count > 1
    ]
    return {name: amount for name, amount in totals.items() if amount}, swept, problems


@contextlib.asynccontextmanager
async def crash_fleet(
    folder: Path, environment: dict[str, str], seed: int
) -> AsyncIterator[CrashFleet]:
    """Run a crash fleet for the time of the block."""
    fleet = CrashFleet(folder, environment, seed)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()


def _amounts(usage: TokenUsage) -> dict[str, int]:
    cached = cached_tokens(usage)
    return {
        "input": (usage.prompt_tokens - cached - usage.cache_write_tokens) * _INPUT,
        "cached_input": cached * _CACHED,
        "cache_write": usage.cache_write_tokens * _WRITTEN,
        "output": usage.output_tokens * _OUTPUT,
    }
