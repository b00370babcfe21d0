"""How far a worker has loaded its model."""

from __future__ import annotations

from headrace_common import rpc
from headrace_common.errors import HeadraceError
from headrace_contracts.worker.v1 import worker_pb2 as pb

_DESCRIBE = rpc.method_ref(
    pb.DESCRIPTOR.services_by_name["Worker"], "Describe", pb.DescribeRequest, pb.DescribeResponse
)
_TIMEOUT_S = 1.0


async def loading_progress(address: str) -> float | None:
    """Ask the worker at *address*; return 0..1, or None while it does not answer."""
    channel = rpc.open_channel(address)
    try:
        answer = await rpc.call_unary(channel, _DESCRIBE, pb.DescribeRequest(), _TIMEOUT_S)
    except HeadraceError:
        return None
    finally:
        await channel.close()
    return float(answer.load_progress_ratio)
