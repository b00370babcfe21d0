"""Names of fields, translated: a request that is read as a chat is told its mistakes in its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from headrace_common.errors import InvalidRequest
from headrace_gateway.api_request import ApiRequest


def renamed(path: str, names: Mapping[str, str]) -> str:
    """Return *path* with its beginning replaced, the longest that *names* knows."""
    for name in sorted(names, key=len, reverse=True):
        if path == name or path.startswith((f"{name}.", f"{name}[")):
            return names[name] + path[len(name) :]
    return path


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Let mistakes found in this block name the fields of the client."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None:
            raise
        param = renamed(error.param, names)
        message = error.public_message.replace(error.param, param)
        raise type(error)(message, param=param) from None


def rename_parts(request: ApiRequest, names: Mapping[str, str]) -> None:
    """Let what the guard is shown carry the client's names."""
    for part in request.guard_parts:
        part.path = renamed(part.path, names)
