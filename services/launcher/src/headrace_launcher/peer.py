"""Calls of the commands to one service: what it refuses is told with its name and address."""

from __future__ import annotations

from typing import TypeVar

import grpc
from google.protobuf.message import Message

from headrace_common import rpc
from headrace_common.errors import HeadraceError

Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)


class PeerError(Exception):
    """A service refused a call or did not answer. Unlike what a command finds by itself."""


async def ask(
    peer: str,
    channel: grpc.aio.Channel,
    method: rpc.MethodRef[Req, Res],
    request: Req,
    timeout_s: float,
) -> Res:
    """Make one call.

    Args:
        peer: who is asked, for people, such as "billing at 127.0.0.1:7000".
        channel: to that service.
        method: what is called.
        request: with this.
        timeout_s: how long to wait.

    Raises:
        PeerError: the service's error, or that it did not answer.
    """
    try:
        return await rpc.call_unary(channel, method, request, timeout_s)
    except HeadraceError as error:
        raise PeerError(f"{peer}: {error.public_message}") from error
