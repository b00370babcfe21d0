"""The socket that the public API listens on: bound here, or inherited from whoever holds it."""

from __future__ import annotations

import socket

from headrace_common.settings import address_family, split_address
from headrace_common.succession import inherited_listener

# What the kernel may keep unsent per connection. Left to itself it grows to megabytes, and a client
# that does not read would be noticed only then.
_SEND_BUFFER_BYTES = 256 * 1024


def listening_socket(address: str, inherited: int | None, *, shares: bool) -> socket.socket:
    """Return the bound socket to listen on.

    Args:
        address: host:port; port 0 takes a free one.
        inherited: descriptor of a socket that is bound already, taken instead of the address.
        shares: whether other processes may listen on the same address too.

    Raises:
        OSError: the address cannot be bound, or the descriptor is none of a TCP socket.
    """
    return _bound(address, shares) if inherited is None else _adopted(inherited)


def _adopted(descriptor: int) -> socket.socket:
    adopted = inherited_listener(descriptor)
    adopted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return adopted


def _bound(address: str, shares_port: bool) -> socket.socket:
    host, port = split_address(address)
    bound = socket.socket(address_family(host), socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    return bound
