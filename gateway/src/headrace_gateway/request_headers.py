"""The headers of a request by name: looked through once, then looked up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Stands for the values of a name that is there more than once. None of them: no value has an end of
# line.
SEVERAL = b"\n"


def headers_by_name(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[bytes, bytes]:
    """Return headers, whose names are in lower case, by name; see `SEVERAL`."""
    by_name: dict[bytes, bytes] = {}
    for name, value in headers:
        by_name[name] = SEVERAL if name in by_name else value
    return by_name
