"""What a client calls its request by a header of its own: told in the story and the log."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_common.errors import InvalidRequest

# OpenAI's, which a client sets itself; and what clients and proxies usually send.
_OWN, _USUAL = b"x-client-request-id", b"x-request-id"
_MAX_CHARS = 512


def client_request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the client's own id of a request, in printable ASCII; empty if it has none.

    A proxy's id that is no such text is passed over: the client cannot help it.

    Raises:
        InvalidRequest: the client set one that is no such text, as OpenAI refuses it.
    """
    own = headers.get(_OWN)
    value = headers.get(_USUAL, b"") if own is None else own
    text = value.decode("latin-1")
    if len(text) <= _MAX_CHARS and text.isascii() and text.isprintable():
        return text
    if own is not None:
        raise InvalidRequest(
            f"X-Client-Request-Id may have up to {_MAX_CHARS} printable ASCII characters.",
            param="X-Client-Request-Id",
        )
    return ""
