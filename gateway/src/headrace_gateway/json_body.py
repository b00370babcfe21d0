"""Strict JSON in: what is wrong is told by field, never by a library's text about itself."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from headrace_common.errors import InvalidRequest

_AT = re.compile(r" - at (?:`(?P<part>key|\w+)` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `([^`]{1,100})")
_UNKNOWN = re.compile(r"Object contains unknown field `(.{1,100}?)`?$", re.DOTALL)
# A number or a length beyond its bound, and how OpenAI's code for that begins and ends.
_BEYOND = re.compile(
    r"Expected `(?P<kind>int|float|str|array|object)`(?P<length> of length)? (?P<way>[<>])"
)
_KINDS = {"int": "integer", "float": "decimal", "str": "string"}
# Free-form values (tool definitions, metadata) may not nest deeper.
MAX_DEPTH = 64
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1

T = TypeVar("T")


class OutOfBounds(InvalidRequest):
    """A value beyond its documented bound; `code` is OpenAI's word for it."""

    reason = "OUT_OF_BOUNDS"

    def __init__(self, public_message: str, *, param: str, code: str) -> None:
        super().__init__(public_message, param=param)
        self.public_code = code


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode *body*. Of a key given twice the last one counts, everywhere.

    Raises:
        InvalidRequest: not JSON, not UTF-8, half a surrogate pair, nested too deeply, or not of
            the documented shape; `param` names the field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except msgspec.DecodeError:
        raise InvalidRequest(
            "The body is not valid JSON in UTF-8 (a cut text, a broken escape such as half a "
            "surrogate pair, or NaN are not JSON)."
        ) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


def convert(value: object, kind: Any, path: str) -> Any:  # Any: a type, and a value of that type
    """Read a JSON value that stands at *path* of a body.

    Raises:
        InvalidRequest: it is not of the documented shape; `param` names the field.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), path) from None


def check_free_form(value: object, param: str) -> None:
    """Refuse a free-form value that nests too deeply, or holds a number that nothing can pass on.

    Raises:
        InvalidRequest: deeper than 64 levels, or an integer of more than 64 bits.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        if any(isinstance(item, int) and not _MIN_INT <= item <= _MAX_INT for item in level):
            raise InvalidRequest(f"{param} holds an integer of more than 64 bits.", param=param)
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise InvalidRequest(f"{param} is nested more than {MAX_DEPTH} levels deep.", param=param)


def _explain(text: str, begin: str = "") -> InvalidRequest:
    found = _AT.search(text)
    path = found["path"].replace("[...]", "") if found else ""
    path = f"{begin}.{path}".strip(".").replace(".[", "[")
    what = text[: found.start()] if found else text
    if missing := _MISSING.match(what):
        path = f"{path}.{missing[1]}".lstrip(".")
        return InvalidRequest(f"Missing required parameter: {path}.", param=path)
    if unknown := _UNKNOWN.match(what):
        path = f"{path}.{unknown[1]}".lstrip(".")
        return InvalidRequest(f"Unrecognized request argument: {path}.", param=path)
    beyond = _BEYOND.match(what)
    what = what.replace("`", "")[:300]
    if not path:
        return InvalidRequest(f"The body is wrong: {what}.")
    told = f"Invalid value for {path}: {what}."
    if beyond is None:
        return InvalidRequest(told, param=path)
    way = "above_max" if beyond["way"] == "<" else "below_min"
    kind = beyond["kind"]
    unit = "properties" if kind == "object" else "length" if beyond["length"] else "value"
    return OutOfBounds(told, param=path, code=f"{_KINDS.get(kind, kind)}_{way}_{unit}")
