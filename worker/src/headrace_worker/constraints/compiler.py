"""Makes constraints ready: off the event loop, each once, bounded in time, size and number.

Tenants share the threads and the places before them. A worker does not know tenants: the salt of
their cache tells them apart. Each waits at its own place, also for what another waits for: whose
turn comes first compiles it for all.

Compiling lets other threads run (llguidance is Rust and drops the interpreter's lock). What takes
too long is refused at once and finishes behind the scenes, where llguidance's own limits end it;
who asks again waits for the same compilation. Refusals are kept like results.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest, QueueFull
from headrace_common.fair_places import FairThreads, NoPlaceError
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.constraints.grammar_text import grammar_text
from headrace_worker.constraints.matcher import GuidedConstraint
from headrace_worker.constraints.refusals import told

# Most constraints kept ready; each holds some 10 kB to a few MB.
_MAX_KEPT = 128
_MAX_WAITING = 32
# Some 25 MB for each that is kept; llguidance's own limit is five times that.
_MAX_LEXER_STATES = 50_000
# One of them is left to others, whoever floods.
_NUM_THREADS = 3
# llguidance's limits end what is hostile within a second or two of computing.
COMPILE_TIMEOUT_S = 10.0


class CompileMetrics(Protocol):
    """Where compilations are counted."""

    def observe_compile(self, outcome: str, duration_s: float) -> None:
        """Note one: ok, cached, refused, timeout or busy."""
        ...


class ConstraintCompiler:
    """Compiles for one tokenizer. `compile` and `close` on the event loop.

    Args:
        make_tokenizer: builds llguidance's tokenizer; called once, on a thread of the pool.
        clock: time.
        metrics: counts.
        timeout_s: longest wait for a compilation.
    """

    def __init__(
        self,
        make_tokenizer: Callable[[], LLTokenizer],
        clock: Clock,
        metrics: CompileMetrics,
        timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        self._make_tokenizer, self._clock, self._metrics = make_tokenizer, clock, metrics
        self._timeout_s = timeout_s
        self._threads = FairThreads(_NUM_THREADS, "constraints", _MAX_WAITING)
        self._tokenizer: asyncio.Future[LLTokenizer] | None = None
        self._kept: OrderedDict[bytes, GuidedConstraint | InvalidRequest] = OrderedDict()
        # By who waits and for what.
        self._pending: dict[tuple[bytes, bytes], asyncio.Future[GuidedConstraint]] = {}
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES)

    def prepare(self) -> None:
        """Begin to build the tokenizer, so that the first constraint does not wait for it."""
        self._begun_tokenizer()

    async def compile(self, whose: bytes, constraint: pb.OutputConstraint) -> GuidedConstraint:
        """Return the constraint made ready.

        Args:
            whose: tells tenants apart.
            constraint: as it came.

        Raises:
            InvalidRequest: it is malformed, asks for what cannot be enforced, or is too complex.
            QueueFull: too many wait to be compiled.
        """
        key = hashlib.blake2b(constraint.SerializeToString(deterministic=True)).digest()
        known = self._kept.get(key)
        if isinstance(known, GuidedConstraint) and known.is_spent:
            del self._kept[key]
            known = None
        if known is not None:
            self._kept.move_to_end(key)
            self._metrics.observe_compile("cached", 0.0)
            return _or_raise(known)
        # Not the client's to answer for, so not within its time.
        await self._ready_tokenizer()
        started_s, outcome = self._clock.now_s(), "refused"
        try:
            async with asyncio.timeout(self._timeout_s):
                # Shielded: others may wait for the same one.
                ready = await asyncio.shield(self._started(whose, key, constraint))
            outcome = "ok"
            return ready
        except TimeoutError:
            outcome = "timeout"
            raise InvalidRequest(
                "The constraint is too complex to be compiled in time.", param="constraint"
            ) from None
        except NoPlaceError:
            outcome = "busy"
            message = "Too many constraints wait to be compiled; who has most is refused first."
            raise QueueFull(message, retry_after_s=1.0) from None
        finally:
            self._metrics.observe_compile(outcome, self._clock.now_s() - started_s)

    def close(self) -> None:
        """Let the threads end; what runs is not waited for."""
        self._threads.close(wait=False)

    def _started(
        self, whose: bytes, key: bytes, constraint: pb.OutputConstraint
    ) -> asyncio.Future[GuidedConstraint]:
        pending = self._pending.get((whose, key))
        if pending is None:
            pending = asyncio.ensure_future(self._build(whose, key, constraint))
            self._pending[whose, key] = pending
            pending.add_done_callback(lambda done: self._ended(whose, key, done))
        return pending

    async def _build(
        self, whose: bytes, key: bytes, constraint: pb.OutputConstraint
    ) -> GuidedConstraint:
        tokenizer = await self._ready_tokenizer()

        def work() -> GuidedConstraint:
            known = self._kept.get(key)
            if known is not None and not (isinstance(known, GuidedConstraint) and known.is_spent):
                return _or_raise(known)
            return _compile(tokenizer, constraint, self._limits)

        # How long one takes cannot be told from its size.
        return await self._threads.run(whose, 1.0, work)

    async def _ready_tokenizer(self) -> LLTokenizer:
        return await asyncio.shield(self._begun_tokenizer())

    def _begun_tokenizer(self) -> asyncio.Future[LLTokenizer]:
        if self._tokenizer is None:
            self._tokenizer = asyncio.ensure_future(
                self._threads.run("tokenizer", 1.0, self._make_tokenizer)
            )
        return self._tokenizer

    def _ended(self, whose: bytes, key: bytes, done: asyncio.Future[GuidedConstraint]) -> None:
        self._pending.pop((whose, key), None)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._keep(key, done.result())
        elif isinstance(error, InvalidRequest):
            self._keep(key, error)

    def _keep(self, key: bytes, result: GuidedConstraint | InvalidRequest) -> None:
        self._kept[key] = result
        self._kept.move_to_end(key)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)


def _compile(
    tokenizer: LLTokenizer, constraint: pb.OutputConstraint, limits: LLParserLimits
) -> GuidedConstraint:
    matcher = LLMatcher(tokenizer, grammar_text(constraint), log_level=0, limits=limits)
    if matcher.is_error():
        raise told("The constraint cannot be used", matcher.get_error())
    return GuidedConstraint(matcher)


def _or_raise(known: GuidedConstraint | InvalidRequest) -> GuidedConstraint:
    if isinstance(known, InvalidRequest):
        # A fresh one: tracebacks and causes pile up on an exception that is raised again.
        raise InvalidRequest(known.public_message, param=known.param)
    return known
