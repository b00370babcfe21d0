"""Calls about KV blocks that a worker does not offer; a servicer inherits those."""

from __future__ import annotations

from collections.abc import AsyncIterator

from headrace_common.errors import Unimplemented
from headrace_common.rpc import Call
from headrace_contracts.worker.v1 import worker_pb2 as pb


class NoKvLeases:
    """Nothing is exported for later."""

    async def ExportKv(self, _request: pb.ExportKvRequest, _call: Call) -> pb.KvTransferHandle:  # noqa: N802 - contract name
        """Not offered."""
        raise Unimplemented("This engine does not export KV blocks.")

    async def ReleaseKv(self, _request: pb.ReleaseKvRequest, _call: Call) -> pb.ReleaseKvResponse:  # noqa: N802 - contract name
        """No lease is ever given, so there is nothing to end."""
        return pb.ReleaseKvResponse()


class NoKv(NoKvLeases):
    """The engine's memory is its own."""

    async def PrefillKv(  # noqa: N802 - contract name
        self, _message: pb.PrefillKvRequest, _call: Call
    ) -> AsyncIterator[pb.KvBlocks]:
        """Not offered."""
        raise Unimplemented("This engine does not hand over KV blocks.")
        yield  # makes this a stream
