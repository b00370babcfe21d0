"""What a worker says that hands no KV blocks to others; its servicer inherits it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from headrace_common.errors import Unimplemented
from headrace_common.rpc import Call
from headrace_contracts.worker.v1 import worker_pb2 as pb


class NoKv:
    """The engine's memory is its own."""

    async def PrefillKv(  # noqa: N802 - contract name
        self, _message: pb.PrefillKvRequest, _call: Call
    ) -> AsyncIterator[pb.KvBlocks]:
        """Not offered."""
        raise Unimplemented("This engine does not hand over KV blocks.")
        yield  # makes this a stream
