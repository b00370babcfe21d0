"""The lines of a batch's input file, checked before any of them runs. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import orjson

from headrace_gateway.answer_extras import Json

MAX_LINES = 50_000
MAX_LINE_BYTES = 2 * 2**20
# Mistakes told of one file.
MAX_ERRORS = 100
_MAX_ID = 256


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: dict[str, msgspec.Raw]


_DECODER = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request of a batch; `body` is JSON."""

    line_no: int
    custom_id: str
    body: bytes


class LineError(Exception):
    """A line is wrong.

    Args:
        code: for machines.
        message: for people.
        line_no: which, from 1; None = the file as a whole.
        param: the field at fault, if one is.
    """

    def __init__(
        self, code: str, message: str, line_no: int | None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.line_no, self.param = code, message, line_no, param

    def as_json(self) -> Json:
        """Return the public object."""
        return {
            "code": self.code,
            "message": self.message,
            "line": self.line_no,
            "param": self.param,
        }


def read_line(raw: bytes, line_no: int, endpoint: str, seen: Collection[str]) -> InputLine:
    """Read one line.

    Raises:
        LineError: it is wrong.
    """
    try:
        line = _DECODER.decode(raw)
    except msgspec.ValidationError as error:
        what = str(error).replace("`", "")[:300]
        raise LineError("invalid_line", f"The line is wrong: {what}.", line_no) from None
    except (msgspec.DecodeError, RecursionError):
        message = "This line is not valid JSON."
        raise LineError("invalid_json_line", message, line_no) from None
    if not 0 < len(line.custom_id) <= _MAX_ID or "\0" in line.custom_id:
        message = f"custom_id must have 1 to {_MAX_ID} characters, none of them NUL."
        raise LineError("invalid_custom_id", message, line_no, "custom_id")
    if line.custom_id in seen:
        message = f"The custom_id {line.custom_id[:60]!r} was used on an earlier line."
        raise LineError("duplicate_custom_id", message, line_no, "custom_id")
    if line.method != "POST":
        raise LineError("invalid_method", "method must be POST.", line_no, "method")
    if line.url != endpoint:
        message = f"url must be the batch's endpoint, {endpoint}."
        raise LineError("mismatched_url", message, line_no, "url")
    if bytes(line.body.get("stream", b"false")) not in (b"false", b"null"):
        message = "A request of a batch cannot be streamed."
        raise LineError("invalid_request", message, line_no, "body.stream")
    for name in ("background", "store"):
        if bytes(line.body.get(name, b"false")) not in (b"false", b"null"):
            message = f"{name} is not possible in a batch."
            raise LineError("invalid_request", message, line_no, f"body.{name}")
    return InputLine(line_no, line.custom_id, msgspec.json.encode(line.body))


def result_line(line_id: str, custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """Return a line of the output or error file: a request that was answered."""
    answer = orjson.Fragment(body)
    return orjson.dumps(
        {
            "id": line_id,
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": answer},
            "error": None,
        }
    )


def dropped_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return a line of the error file: a request that was never answered."""
    return orjson.dumps(
        {
            "id": line_id,
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )
