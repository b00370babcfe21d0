"""Watches one worker: describes it, then follows its load reports."""

from __future__ import annotations

from contextlib import aclosing

from grpc.aio import Channel

from headrace_common.clock import Clock
from headrace_common.errors import ReplicaLost
from headrace_common.kv_index import ReplicaKey
from headrace_common.rpc import call_stream, call_unary, method_ref, open_channel
from headrace_contracts.worker.v1 import worker_pb2
from headrace_contracts.worker.v1.worker_pb2 import (
    DescribeRequest,
    DescribeResponse,
    LoadReport,
    WatchLoadRequest,
)
from headrace_router.decode_prediction import DecodePredictor
from headrace_router.load_guard import LoadBook
from headrace_router.prediction import PrefillPredictor
from headrace_router.replicas import ReplicaTable

_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
DESCRIBE = method_ref(_SERVICE, "Describe", DescribeRequest, DescribeResponse)
WATCH_LOAD = method_ref(_SERVICE, "WatchLoad", WatchLoadRequest, LoadReport)
_REPORT_INTERVAL_MS = 250
_DESCRIBE_TIMEOUT_S = 2.0


class WorkerWatch:
    """Follows the worker at one address, through all its lives.

    Args:
        address: host:port.
        table: where what it says is kept.
        loads: told of each report, to reconcile its own count.
        prefill: told of each report, to learn from it.
        decode: likewise.
        clock: time.
    """

    def __init__(
        self,
        address: str,
        table: ReplicaTable,
        loads: LoadBook,
        prefill: PrefillPredictor,
        decode: DecodePredictor,
        clock: Clock,
    ) -> None:
        self._address, self._table, self._loads, self._clock = address, table, loads, clock
        self._prefill, self._decode = prefill, decode

    async def follow(self) -> None:
        """Follow one connection to its end; the worker is unreachable from then on.

        Raises:
            HeadraceError: the connection broke or cannot be made.
        """
        channel = open_channel(self._address)
        try:
            await self._describe(channel)
            request = WatchLoadRequest(interval_ms=_REPORT_INTERVAL_MS)
            async with aclosing(call_stream(channel, WATCH_LOAD, request)) as reports:
                async for report in reports:
                    await self._take(channel, report)
            raise ReplicaLost(f"The worker at {self._address} ended its reports.")
        finally:
            self._table.lose(self._address)
            await channel.close()

    async def _take(self, channel: Channel, report: LoadReport) -> None:
        now_s = self._clock.now_s()
        key = ReplicaKey.of(report.replica)
        self._loads.note_report(key, now_s)
        self._decode.observe(key, report)
        self._prefill.observe_report(key, report)
        if not self._table.report(self._address, report, now_s):
            await self._describe(channel)
            self._table.report(self._address, report, now_s)

    async def _describe(self, channel: Channel) -> None:
        described = await call_unary(channel, DESCRIBE, DescribeRequest(), _DESCRIBE_TIMEOUT_S)
        self._table.describe(self._address, described)
