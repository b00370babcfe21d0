"""One line of a batch through the same flow as any request: batch class, lowest priority."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace_common.errors import HeadraceError, Internal, ModelNotFound
from headrace_contracts.types.v1.types_pb2 import PRIORITY_BATCH
from headrace_contracts.usage.v1.usage_pb2 import PRICE_TIER_BATCH
from headrace_gateway.captured_exchange import CapturedExchange
from headrace_gateway.principal import Principal
from headrace_gateway.request_flow import RequestFlow
from headrace_gateway.tries_log import TriesLog
from headrace_gateway.visit import Caller, Dialect, Visit

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """What came of one try.

    Args:
        status: HTTP status as it would have been.
        body: JSON of the answer, or of the error.
        retry_after_s: when another try may help; None = this is final.
    """

    status: int
    body: bytes
    retry_after_s: float | None


class LineCaller:
    """Answers lines.

    Args:
        flow: serves them.
        dialects: how each endpoint is spoken, by path.
        is_starting: whether an unknown model may be known later.
    """

    def __init__(
        self,
        flow: RequestFlow,
        dialects: Mapping[str, Dialect],
        is_starting: Callable[[], bool],
    ) -> None:
        self._is_starting = is_starting
        self._log = TriesLog(flow.usage_log)
        self._flow, self._dialects = replace(flow, usage_log=self._log), dialects

    async def call(
        self, principal: Principal, url: str, request_id: str, body: bytes
    ) -> LineOutcome:
        """Try once. A line keeps its request id over all tries; see `close_line`."""
        owner = replace(principal, priority=PRIORITY_BATCH)
        exchange, dialect = CapturedExchange(), self._dialects[url]
        failure: HeadraceError
        try:
            reading = await dialect.read(body, Caller(request_id, owner, exchange))
            visit = Visit(
                request_id,
                owner,
                exchange,
                reading.request,
                reading.make_sink,
                self._flow.clock.now_s(),
                price_tier=PRICE_TIER_BATCH,
            )
            await self._flow.serve(visit)
        except HeadraceError as error:
            failure = error
        except Exception:  # noqa: BLE001 - the edge: one line must not hold up its batch for ever
            _log.exception("%s failed", request_id)
            failure = Internal()
        else:
            return LineOutcome(exchange.status, exchange.body, None)
        may_help = failure.retryable
        if isinstance(failure, ModelNotFound):
            # Who asks sees it; a line would be lost for good.
            may_help = self._is_starting()
        retry_after_s = (failure.retry_after_s or 1.0) if may_help else None
        told = dialect.error_body(failure, request_id)
        return LineOutcome(failure.http_status, told, retry_after_s)

    def is_answered(self, request_id: str) -> bool:
        """Whether a line is paid for with an answer that is not kept yet."""
        return self._log.is_answered(request_id)

    def close_line(self, request_id: str) -> None:
        """Close the books of a line whose result is kept, if its last try has not."""
        self._log.close_request(request_id)
