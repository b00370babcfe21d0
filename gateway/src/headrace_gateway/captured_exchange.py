"""An exchange with nobody at the other end: the answer is kept instead of sent."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_gateway.error_body import Headers


class CapturedExchange:
    """Keeps one answer. An answer is bounded by its request's output tokens, so this is too.

    Args:
        request_headers: those of the request that it stands for; None = there are none.
    """

    def __init__(self, request_headers: Mapping[bytes, bytes] | None = None) -> None:
        self.request_headers = request_headers or {}
        self.headers: Headers = []
        self.has_begun = False
        self.is_over = False
        self.client_is_gone = False
        self.num_events = 0
        self.client_id = ""
        self.status = 0
        self._pieces: list[bytes] = []

    @property
    def body(self) -> bytes:
        """What was sent so far."""
        return b"".join(self._pieces)

    async def send_json(self, status: int, body: bytes, extra: Headers | None = None) -> None:
        """Keep a whole answer."""
        self.headers += extra or []
        self.status, self._pieces = status, [body]
        self.has_begun = self.is_over = True

    async def begin_stream(self) -> None:
        """Begin to keep a stream."""
        self.status, self.has_begun = 200, True

    def try_send_events(self, events: bytes) -> bool:
        """Leave it to `send_events`, which those that keep more than the bytes refine."""
        del events
        return False

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Keep events."""
        self._pieces.append(events)
        self.is_over = self.is_over or is_last
