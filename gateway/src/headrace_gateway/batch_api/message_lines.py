"""Message batches in Anthropic's words, made of what any batch is kept as. Pure.

A line of results is written when it is read: batches keep their results in one form.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import msgspec
import orjson

from headrace_gateway.answer_extras import Json

ENDPOINT = "/v1/messages"
# How the public object calls a batch's endings; what else a batch may be is not ended.
_ENDINGS = ("completed", "failed", "expired", "cancelled")
# How a request that was never answered ended, by the code of its line.
_DROPPED = {"batch_cancelled": "canceled", "batch_expired": "expired"}
_OUTCOMES = ("succeeded", "errored", "canceled", "expired")


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Dropped(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Dropped | None = None


_DECODER = msgspec.json.Decoder(_Line)


class OutcomeCounts:
    """How many requests of a batch ended in which way."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, kept: bytes) -> None:
        """Count a line's result."""
        self._counts[_outcome(_DECODER.decode(kept))] += 1

    def as_json(self) -> Json:
        """Return the public object of a batch that has ended."""
        return {"processing": 0, **{name: self._counts[name] for name in _OUTCOMES}}


def result_line(kept: bytes) -> bytes:
    """Return a line of the results from the one that is kept."""
    line = _DECODER.decode(kept)
    outcome = _outcome(line)
    result: Json = {"type": outcome}
    if line.response is not None:
        name = "message" if outcome == "succeeded" else "error"
        result[name] = orjson.Fragment(bytes(line.response.body))
    elif line.error is not None and outcome == "errored":
        # The key is no good any more: nothing else ends a batch that has begun.
        told = {"type": "authentication_error", "message": line.error.message}
        result["error"] = {"type": "error", "error": told, "request_id": None}
    return orjson.dumps({"custom_id": line.custom_id, "result": result})


def message_batch(batch: Json) -> Json:
    """Return the public object of a batch as the state tells of it."""
    has_ended = batch["status"] in _ENDINGS
    cancelled_s = batch.get("cancelling_at")
    status = "in_progress" if cancelled_s is None else "canceling"
    num_requests = batch["request_counts"]["total"]
    pending = {"processing": num_requests, **dict.fromkeys(_OUTCOMES, 0)}
    return {
        "id": batch["id"],
        "type": "message_batch",
        "processing_status": "ended" if has_ended else status,
        "request_counts": batch.get("outcomes", pending),
        "created_at": _moment(batch["created_at"]),
        "expires_at": _moment(batch["expires_at"]),
        "ended_at": _moment(batch[f"{batch['status']}_at"]) if has_ended else None,
        "cancel_initiated_at": None if cancelled_s is None else _moment(cancelled_s),
        "archived_at": None,
        # Beside the address that the client knows: a key is sent to no other.
        "results_url": f"{ENDPOINT}/batches/{batch['id']}/results" if has_ended else None,
    }


def _outcome(line: _Line) -> str:
    if line.response is not None:
        return "succeeded" if line.response.status_code == 200 else "errored"
    return _DROPPED.get(line.error.code if line.error else "", "errored")


def _moment(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
