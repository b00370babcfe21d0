"""The sequence of a request, cancelled wherever that is possible."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
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

    def opened(self, event: UsageEvent) -> asyncio.Future[None]:
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


def flow_over(limiter: Limiter) -> tuple[RequestFlow, Admission]:
    metrics, clock = GatewayMetrics(CollectorRegistry()), SystemClock()
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
        prices=PriceBook(clock),
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
