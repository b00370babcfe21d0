"""The sequence of a request, cancelled wherever that is possible."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.clock import Clock, SystemClock
from headrace_contracts.billing.v1.billing_pb2 import Price, PriceTable
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_contracts.worker.v1.worker_pb2 import ModelCard
from headrace_gateway.admission import Admission
from headrace_gateway.closings import Closings
from headrace_gateway.intake import EncodedPrompt
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.model_directory import ServedCard
from headrace_gateway.model_routes.choice import ModelChoice
from headrace_gateway.openai_dialect import make_sink
from headrace_gateway.openai_schema import parse_chat
from headrace_gateway.pricing import PriceBook
from headrace_gateway.principal import Principal
from headrace_gateway.request_flow import FlowLimits, RequestFlow
from headrace_gateway.token_ids import TokenIds
from headrace_gateway.visit import Visit

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}'


class Limiter:
    """Admits everything, a turn of the loop later; knows which leases live."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.num_admitted = 0

    async def admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        await asyncio.sleep(0)
        self.live.add(request.lease_id)
        self.num_admitted += 1
        await asyncio.sleep(0)
        return pb.AdmitResponse(outcome=pb.AdmitResponse.OUTCOME_ADMITTED)

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        self.live.discard(request.lease_id)
        return pb.SettleResponse(settled=True)

    def settle_soon(self, request: pb.SettleRequest) -> None:
        return None

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        raise AssertionError(request)


class FullUsageLog:
    """Takes no `opened`: a request that comes so far ends there."""

    is_full = False

    def __init__(self) -> None:
        self.offered: list[UsageEvent] = []

    def opened(self, event: UsageEvent) -> asyncio.Future[None]:
        self.offered.append(event)
        raise ConnectionAbortedError(event.request_id)


class Verdict:
    """Nothing was found."""

    elapsed_s = 0.0

    async def result(self) -> dict[int, str]:
        await asyncio.sleep(0)
        return {}

    def cancel(self) -> None:
        """Nobody waits for it."""


class Guard:
    """Finds nothing."""

    async def ask(self, *_: object) -> Verdict:
        await asyncio.sleep(0)
        return Verdict()


class Intake:
    """One prompt of one token."""

    async def encode(self, *_: object) -> list[EncodedPrompt]:
        return [EncodedPrompt(TokenIds.of([1]), b"", 2)]


class HastyClock:
    """A second passes whenever somebody looks at the wall clock."""

    def __init__(self) -> None:
        self.second = 0

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        self.second += 1
        return float(self.second)


def flow_over(limiter: Limiter, clock: Clock | None = None) -> tuple[RequestFlow, Admission]:
    metrics, clock = GatewayMetrics(CollectorRegistry()), clock or SystemClock()
    admission = Admission(limiter, metrics)
    card = ServedCard.of(ModelCard(model="m"))
    model = SimpleNamespace(encoder=None, card=card)
    unused = cast(Any, None)

    async def choose(*_: object) -> tuple[ModelChoice, object]:
        return ModelChoice("m", "m"), model

    flow = RequestFlow(
        names=cast(Any, SimpleNamespace(choose=choose)),
        intake=cast(Any, Intake()),
        input_guard=cast(Any, Guard()),
        output_guard=unused,
        sent_reports=unused,
        admission=admission,
        generator=unused,
        usage_log=cast(Any, FullUsageLog()),
        prices=PriceBook(),
        clock=clock,
        metrics=metrics,
        limits=FlowLimits(),
        closings=Closings(metrics),
    )
    return flow, admission


async def test_what_is_admitted_is_given_back_wherever_the_client_leaves() -> None:
    """A lease that nobody settles would be renewed for ever, and hold its slot and its money."""
    limiter = Limiter()
    flow, admission = flow_over(limiter)
    num_turns = 0
    while True:
        exchange = cast(Any, SimpleNamespace(headers=[], client_is_gone=True))
        name = f"req_{num_turns}"
        visit = Visit(name, Principal(tenant_id="t"), exchange, parse_chat(BODY), make_sink, 0.0)
        serving = asyncio.create_task(flow.serve(visit))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_over = serving.done()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionAbortedError):
            await serving
        await flow.closings.drain()
        await admission.close()
        assert limiter.live == set(), f"left after {num_turns} turns"
        if was_over:
            break
        num_turns += 1
    assert num_turns > limiter.num_admitted > 1


async def test_a_request_is_held_at_the_price_of_the_moment_it_is_recorded_with() -> None:
    """The ledger prices it by that moment; a price may begin while it is admitted."""
    flow, admission = flow_over(Limiter(), HastyClock())
    rows = [
        Price(model="m", version=it, input_nano_usd=it, effective_from_unix_s=it)
        for it in range(1, 100)
    ]
    flow.prices.load(PriceTable(version=99, prices=rows))
    exchange = cast(Any, SimpleNamespace(headers=[], client_is_gone=False))
    visit = Visit("req_1", Principal(tenant_id="t"), exchange, parse_chat(BODY), make_sink, 0.0)
    with pytest.raises(ConnectionAbortedError):
        await flow.serve(visit)
    await flow.closings.drain()
    await admission.close()
    [opened] = cast(FullUsageLog, flow.usage_log).offered
    assert opened.hold_nano_usd == opened.admitted_unix_us // 1_000_000 > 0
