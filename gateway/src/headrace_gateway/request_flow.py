"""The one sequence that every generating request goes through.

::

    [ encode --> admit ]  beside  [ guard input ]
            |
    opened (outbox) --> pick, generate, guard output (answer.py) --> closed (outbox, on disk)
                                                                 '-> lease settled
                                                                 --> last bytes to the client

From `opened` on, exactly one `closed` follows, whatever the ending: `_close` says all of it before
it waits for the first time, so that a cancellation only ends the waiting. A refusal before `opened`
leaves nothing behind but a counted request.

A model that cannot answer gives way to the next of its route before the first byte; `closed` then
names the one that answered, at its own price.

Long because it is one sequence, whose steps share what has to be undone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace_common.clock import Clock, unix_us
from headrace_common.errors import (
    ClientGone,
    Deadline,
    HeadraceError,
    InvalidRequest,
    NoReplica,
    Unavailable,
)
from headrace_common.price_rows import cached_tokens
from headrace_common.telemetry import is_recorded, span
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Amounts
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.admission import Admission, Lease
from headrace_gateway.answer import Answer, Sink, VectorSink, total_usage
from headrace_gateway.auth import check_scope
from headrace_gateway.closings import Closings, wait_at_most
from headrace_gateway.constraints import for_client
from headrace_gateway.embeddings import embed_request
from headrace_gateway.generation import Generator
from headrace_gateway.guard_parts import complete_guard_parts
from headrace_gateway.input_guard import InputGuard, PendingVerdict
from headrace_gateway.intake import (
    EncodedPrompt,
    Intake,
    TierGoals,
    add_id_prompts,
    make_jobs,
    most_output_tokens,
    num_chars,
    reservation,
)
from headrace_gateway.job import Job
from headrace_gateway.kept_alive import KeptAlive
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.model_directory import ServedModel
from headrace_gateway.model_routes.model_names import ModelNames
from headrace_gateway.output_check import OutputOpener, open_output_check
from headrace_gateway.output_estimate import OutputEstimates
from headrace_gateway.pricing import PriceBook, hold_nano_usd
from headrace_gateway.principal import Principal
from headrace_gateway.rate_headers import limit_headers
from headrace_gateway.sent_reports import SentReports
from headrace_gateway.stories import Stories
from headrace_gateway.usage_events import Account, UsageLog
from headrace_gateway.visit import Visit

_log = logging.getLogger(__name__)

# Larger inputs are encoded first: one that does not fit the context is not worth the guard's time.
_GUARD_LATER_CHARS = 64 * 1024
# The last event waits so long for the lease's return; then it goes on behind the answer.
_SETTLE_WAIT_S = 0.25


@dataclass(frozen=True)
class FlowLimits:
    """Bounds of one request. Seconds."""

    request_timeout_s: float = 600.0
    keep_alive_s: float = 10.0
    silent_start_s: float = 15.0
    goals: TierGoals = field(default_factory=TierGoals)


@dataclass
class _Admitted:
    model: ServedModel
    prompts: list[EncodedPrompt]
    # None = given back already, between two models.
    lease: Lease | None
    account: Account
    hold_nano_usd: int


@dataclass(frozen=True)
class RequestFlow:
    """Serves requests. Shared by all; belongs to one event loop."""

    names: ModelNames
    intake: Intake
    input_guard: InputGuard
    output_guard: OutputOpener
    sent_reports: SentReports
    admission: Admission
    generator: Generator
    usage_log: UsageLog
    prices: PriceBook
    clock: Clock
    metrics: GatewayMetrics
    limits: FlowLimits
    closings: Closings
    output_estimates: OutputEstimates = field(default_factory=OutputEstimates)
    stories: Stories | None = None

    async def serve(self, visit: Visit) -> None:
        """Answer one request. Cancelling it closes the request as left by the client.

        Raises:
            HeadraceError: refused or failed; the exchange says whether an answer has begun.
        """
        visit.choice, model = await self.names.choose(
            visit.request, visit.principal, visit.request_id
        )
        check_scope(visit.principal, "inference")
        visit.request.model = model.card.model
        if self.usage_log.is_full:
            raise Unavailable("Usage cannot be recorded now.", retry_after_s=5.0)
        admitted = await self._admit(visit, model)
        try:
            if visit.on_admitted is not None:
                await visit.on_admitted()
            self._open(visit, admitted)
        except BaseException:
            self._give_back(admitted, Amounts(requests=1))
            raise
        await self._serve_admitted(visit, admitted)

    # --- before the work -------------------------------------------------------------------

    async def _admit(self, visit: Visit, model: ServedModel) -> _Admitted:
        request = visit.request
        add_id_prompts(request, model.encoder)
        complete_guard_parts(request)
        verdict: PendingVerdict | None = None
        lease: Lease | None = None
        try:
            try:
                if num_chars(request) <= _GUARD_LATER_CHARS or request.unsupported:
                    # On its way before a long text is encoded, which happens on a thread.
                    verdict = await self._ask_guard(visit)
                prompts = await self._encode(visit, model, verdict)
                verdict = verdict or await self._ask_guard(visit)
                account = self._account(visit)
                reserve = self._reservation(visit, prompts, account)
                with _Stage(self, visit, "admit"):
                    lease = await self.admission.admit(
                        visit.principal, visit.request_id, reserve, request.model
                    )
                visit.exchange.headers += limit_headers(lease.standing)
                redacted = await self._take_verdict(visit, verdict)
                if redacted:
                    request.redact(redacted)
                    prompts = await self.intake.encode(request, model, visit.principal)
            finally:
                if verdict is not None:
                    verdict.cancel()
        except BaseException:
            if lease is not None:
                self.closings.keep(lease.settle_soon(Amounts(requests=1)))
            raise
        return _Admitted(model, prompts, lease, account, reserve.cost_nano_usd)

    def _reservation(self, visit: Visit, prompts: list[EncodedPrompt], account: Account) -> Amounts:
        request, expected = visit.request, None
        if request.limits.max_tokens is None:
            expected = self.output_estimates.get(request.model)
        reserve = reservation(prompts, request.n, expected)
        reserve.cost_nano_usd = hold_nano_usd(
            account.rates, reserve.input_tokens, most_output_tokens(prompts, request.n)
        )
        return reserve

    async def _ask_guard(self, visit: Visit) -> PendingVerdict:
        return await self.input_guard.ask(
            visit.principal,
            visit.request_id,
            visit.request.guard_parts,
            visit.request.opaque_paths,
        )

    async def _take_verdict(self, visit: Visit, verdict: PendingVerdict) -> Mapping[int, str]:
        with span("guard"):
            try:
                return await verdict.result()
            finally:
                self.note_stage(visit, "guard", verdict.elapsed_s)

    async def _encode(
        self, visit: Visit, model: ServedModel, verdict: PendingVerdict | None
    ) -> list[EncodedPrompt]:
        """Encode; what the guard finds is told before what else is wrong."""
        try:
            if visit.request.unsupported is not None:
                raise visit.request.unsupported
            with _Stage(self, visit, "tokenise"):
                return await self.intake.encode(visit.request, model, visit.principal)
        except HeadraceError:
            if verdict is not None:
                await self._take_verdict(visit, verdict)
            raise

    def _account(self, visit: Visit) -> Account:
        request = visit.request
        # Read once: at a second's end another price may begin.
        now_us = unix_us(self.clock)
        rates = self.prices.find(request.model, now_us, visit.price_tier)
        if not rates.levels:
            self.metrics.unpriced.inc()
        return Account(
            request_id=visit.request_id,
            principal=visit.principal,
            model=request.model,
            endpoint=request.endpoint.value,
            is_stream=request.streaming.is_stream,
            rates=rates,
            admitted_unix_us=now_us,
            price_version=self.prices.version,
            price_tier=visit.price_tier,
        )

    def _open(self, visit: Visit, admitted: _Admitted) -> None:
        visit.jobs = self._jobs(visit, admitted.model, admitted.prompts)
        now_us = unix_us(self.clock)
        deadline_us = now_us + int(self.limits.request_timeout_s * 1e6)
        event = admitted.account.opened(now_us, admitted.hold_nano_usd, deadline_us)
        visit.recorded = self.usage_log.opened(event)

    def _jobs(self, visit: Visit, model: ServedModel, prompts: list[EncodedPrompt]) -> list[Job]:
        goals = self.limits.goals
        jobs = make_jobs(visit.request_id, visit.request, model, visit.principal, prompts, goals)
        if visit.choice is not None and visit.choice.may_leave(NoReplica("")):
            for job in jobs:
                job.has_spare = True
        return jobs

    # --- the work --------------------------------------------------------------------------

    async def _serve_admitted(self, visit: Visit, admitted: _Admitted) -> None:
        ending: usage_pb2.Ending.ValueType = usage_pb2.ENDING_FAILED
        try:
            sink = await self._work(visit, admitted)
            ending = usage_pb2.ENDING_COMPLETED
            if visit.delivery is not None and visit.delivery.is_blocked:
                ending = usage_pb2.ENDING_OUTPUT_BLOCKED
        except BaseException as error:
            ending = self._ending(visit, error)
            raise
        finally:
            with _Stage(self, visit, "close"):
                await self._close(visit, admitted, ending)
        await sink.end(total_usage(visit.jobs))

    async def _work(self, visit: Visit, admitted: _Admitted) -> Sink | VectorSink:
        """Answer, by the models of the route one after the other; return where the answer went."""
        while True:
            sink = visit.make_sink(visit, admitted.model, self.clock)
            try:
                if isinstance(sink, VectorSink):
                    await self._embed(visit, sink)
                elif not visit.request.streaming.is_stream:
                    await self._answer(visit, sink)
                else:
                    async with self._kept_alive(visit, sink):
                        await self._answer(visit, sink)
            except HeadraceError as error:
                if not self._may_fall_back(visit, error):
                    raise
                await self._fall_back(visit, admitted, error)
            else:
                return sink

    def _may_fall_back(self, visit: Visit, error: HeadraceError) -> bool:
        """Whether nothing was sent or made, another model is left, and there is time for it."""
        return (
            visit.choice is not None
            and visit.choice.may_leave(error)
            and not visit.exchange.has_begun
            and not any(job.has_tokens for job in visit.jobs)
            and self.clock.now_s() < visit.started_s + self.limits.request_timeout_s
        )

    async def _fall_back(self, visit: Visit, admitted: _Admitted, error: HeadraceError) -> None:
        """Prepare the request for the next model that takes it.

        Raises:
            HeadraceError: none does; it is the first one's failure.
        """
        choice, why = visit.choice, error
        while choice is not None and choice.spares:
            name = choice.next_model(why)
            self.metrics.fallbacks.labels(error.reason).inc()
            _log.info("%s falls back to %s: %s", visit.request_id, name, error)
            try:
                await self._admit_again(visit, admitted, self.names.get(name))
            except HeadraceError as refusal:
                _log.info("%s: %s does not take it: %s", visit.request_id, name, refusal)
                why = refusal
            else:
                return
        raise error

    async def _admit_again(self, visit: Visit, admitted: _Admitted, model: ServedModel) -> None:
        """Take the request to another model: its own tokens, limits, price and hold."""
        visit.request.model = model.card.model
        prompts = await self.intake.encode(visit.request, model, visit.principal)
        account = self._account(visit)
        reserve = self._reservation(visit, prompts, account)
        # First given back, so that the limits see one request and not two.
        given_back = self._give_back(admitted, Amounts())
        if given_back is not None:
            await asyncio.wait({given_back})
        num_failed = 0 if visit.choice is None else len(visit.choice.failed)
        admitted.lease = await self.admission.admit(
            visit.principal, f"{visit.request_id}.m{num_failed}", reserve, visit.request.model
        )
        admitted.model, admitted.prompts, admitted.account = model, prompts, account
        visit.jobs = self._jobs(visit, model, prompts)

    async def _answer(self, visit: Visit, sink: Sink) -> None:
        deadline_s = visit.started_s + self.limits.request_timeout_s
        check = await open_output_check(
            self.output_guard,
            visit.principal,
            visit.request_id,
            self.metrics,
            # Log probabilities go with the token that was judged.
            is_whole=not (visit.request.streaming.is_stream or visit.request.logprobs),
        )

        start_bound = _start_bound(visit)

        def on_started(job: Job) -> None:
            self._add_headers(visit, job)
            if start_bound is not None:
                start_bound.reschedule(None)

        tools = visit.request.tools
        answer = Answer(
            self.generator,
            visit.jobs,
            check,
            sink,
            self.clock,
            on_started,
            tools=tools if tools is not None and tools.is_offered else None,
            is_echo_only=visit.request.shown.is_echo_only,
        )
        answer.before_first = partial(self._before_first, visit)
        visit.delivery = answer.delivery
        try:
            # The calls to router and worker end at the deadline by themselves.
            if start_bound is None:
                await answer.run(deadline_s)
            else:
                async with start_bound:
                    await answer.run(deadline_s)
        except (Deadline, TimeoutError) as error:
            raise Deadline("The request took too long.") from error
        except InvalidRequest as error:
            raise for_client(error, visit.request) from error

    async def _before_first(self, visit: Visit) -> None:
        # Whole answers wait for `closed`, which comes behind `opened`.
        if visit.recorded is not None and visit.request.streaming.is_stream:
            await self.usage_log.until_recorded(visit.recorded)

    async def _embed(self, visit: Visit, sink: VectorSink) -> None:
        """All inputs go to one replica in one call; the first job stands for them."""
        request = embed_request(visit.request_id, visit.jobs, visit.principal)
        del visit.jobs[1:]
        deadline_s = visit.started_s + self.limits.request_timeout_s
        sink.vectors = await self.generator.embed(visit.jobs[0], request, deadline_s)
        self._add_headers(visit, visit.jobs[0])

    def _kept_alive(self, visit: Visit, sink: Sink) -> KeptAlive:
        open_by_s = visit.started_s + self.limits.silent_start_s
        before_first = partial(self._before_first, visit)
        every_s = self.limits.keep_alive_s
        return KeptAlive(sink, visit.exchange, self.clock, open_by_s, every_s, before_first)

    def _add_headers(self, visit: Visit, job: Job) -> None:
        elapsed_ms = (self.clock.now_s() - visit.started_s) * 1000
        visit.exchange.headers += [
            (b"openai-processing-ms", b"%d" % elapsed_ms),
            (b"x-headrace-cached-tokens", b"%d" % cached_tokens(job.read_usage())),
        ]
        if visit.choice is not None and visit.choice.kind != "direct":
            visit.exchange.headers += visit.choice.headers()
        if job.queue_s is not None:
            visit.exchange.headers.append((b"x-headrace-queue-ms", b"%d" % (job.queue_s * 1000)))
        if job.replicas:
            visit.exchange.headers.append(
                (b"x-headrace-replica", job.replicas[-1].worker_id.encode())
            )

    # --- after the work --------------------------------------------------------------------

    def _ending(self, visit: Visit, error: BaseException) -> usage_pb2.Ending.ValueType:
        if visit.exchange.client_is_gone or isinstance(error, ClientGone):
            return usage_pb2.ENDING_CLIENT_GONE
        if isinstance(error, Deadline):
            return usage_pb2.ENDING_DEADLINE
        return usage_pb2.ENDING_FAILED

    async def _close(
        self, visit: Visit, admitted: _Admitted, ending: usage_pb2.Ending.ValueType
    ) -> None:
        """Record the end and settle; what is awaited here happens whoever waits."""
        event = self._closed_event(visit, admitted, ending)
        settling = self._give_back(admitted, _spent(event, visit.principal))
        self.sent_reports.tell(visit)
        if self.stories is not None:
            self.stories.add(visit, event)
        ended = self.closings.until_recorded(visit.request_id, self.usage_log.closed(event))
        self._note_usage(visit, event)
        await ended
        if settling is not None and not settling.done():
            await wait_at_most(settling, _SETTLE_WAIT_S)

    def _closed_event(
        self, visit: Visit, admitted: _Admitted, ending: usage_pb2.Ending.ValueType
    ) -> usage_pb2.UsageEvent:
        event = admitted.account.closed(
            unix_us(self.clock),
            total_usage(visit.jobs),
            ending,
            [ref for job in visit.jobs for ref in job.replicas],
            estimated=any(it.is_estimate or not it.read_usage().prompt_tokens for it in visit.jobs),
        )
        event.duration_s = self.clock.now_s() - visit.started_s
        if visit.delivery is not None and visit.delivery.first_text_s is not None:
            event.ttft_s = visit.delivery.first_text_s - visit.started_s
        return event

    def _note_usage(self, visit: Visit, event: usage_pb2.UsageEvent) -> None:
        usage = event.usage
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        self.metrics.cached_tokens.inc(cached_tokens(usage))
        self.metrics.output_tokens.inc(usage.output_tokens)
        if visit.delivery is not None and visit.delivery.first_text_s is not None:
            self._note_speed(visit, event.ttft_s, event.duration_s, usage.output_tokens)
        is_whole = event.ending == usage_pb2.ENDING_COMPLETED
        if is_whole and visit.request.limits.max_tokens is None:
            num_choices = len(visit.jobs) * visit.request.n
            self.output_estimates.add(visit.request.model, usage.output_tokens // num_choices)

    def _note_speed(self, visit: Visit, ttft_s: float, duration_s: float, num_tokens: int) -> None:
        endpoint, is_stream = visit.request.endpoint.value, visit.request.streaming.is_stream
        way = "stream" if is_stream else "whole"
        self.metrics.ttft_s.labels(endpoint, way).observe(ttft_s)
        # Tokens of several choices come between one another.
        if is_stream and num_tokens > 1 and len(visit.jobs) * visit.request.n == 1:
            self.metrics.tpot_s.labels(endpoint).observe((duration_s - ttft_s) / (num_tokens - 1))

    def _give_back(self, admitted: _Admitted, actual: Amounts) -> asyncio.Future[Any] | None:
        """Begin to settle the lease, once; None = it was settled before."""
        lease, admitted.lease = admitted.lease, None
        return None if lease is None else self.closings.keep(lease.settle_soon(actual))

    def note_stage(self, visit: Visit, name: str, elapsed_s: float) -> None:
        """Note how long a stage took."""
        visit.stages_s[name] = elapsed_s
        self.metrics.stages_s[name].observe(elapsed_s)


class _Stage:
    """A block whose time is noted, inside a span if the trace is recorded."""

    __slots__ = ("_flow", "_name", "_span", "_started_s", "_visit")

    def __init__(self, flow: RequestFlow, visit: Visit, name: str) -> None:
        self._flow, self._visit, self._name = flow, visit, name
        self._span = span(name) if is_recorded() else None
        self._started_s = flow.clock.now_s()

    def __enter__(self) -> None:
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, *exc_info: Any) -> None:  # Any: as the language passes them
        flow = self._flow
        flow.note_stage(self._visit, self._name, flow.clock.now_s() - self._started_s)
        if self._span is not None:
            self._span.__exit__(*exc_info)


def _spent(event: usage_pb2.UsageEvent, principal: Principal) -> Amounts:
    """Return what a request used of its limits."""
    usage = event.usage
    return Amounts(
        requests=1,
        input_tokens=usage.prompt_tokens,
        cached_input_tokens=0 if principal.counts_cached_input else cached_tokens(usage),
        output_tokens=usage.output_tokens,
        cost_nano_usd=event.amount_nano_usd,
    )


def _start_bound(visit: Visit) -> asyncio.Timeout | None:
    """Return by when a worker must have begun, while there is another model to turn to."""
    choice = visit.choice
    if choice is None or not choice.spares or choice.start_timeout_s is None:
        return None
    return asyncio.timeout(choice.start_timeout_s)
