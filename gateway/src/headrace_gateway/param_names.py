"""Names of fields, translated: a request that is read as a chat is told its mistakes in its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headrace_common.errors import InvalidRequest
from headrace_gateway.api_request import ApiRequest
from headrace_gateway.guard_parts import complete_guard_parts
from headrace_gateway.openai_bodies import MessageBody, ToolCallBody


@dataclass
class TranslatedChat:
    """Messages as a chat has them, and how the client calls each.

    Args:
        names: of the client's fields, by the chat's.
    """

    names: dict[str, str]
    messages: list[MessageBody] = field(default_factory=list)

    def add(self, message: MessageBody, name: str, **fields: str) -> None:
        """Add what the client calls *name*; *fields* are those called otherwise, "" = it itself."""
        self._call(f"messages[{len(self.messages)}]", name, fields)
        self.messages.append(message)

    def add_call(self, call: ToolCallBody, name: str, **fields: str) -> None:
        """Add a call to the last message."""
        message = self.messages[-1]
        calls = message.tool_calls or []
        place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self._call(place, name, fields)
        for kind in ("function", "custom"):
            self._call(f"{place}.{kind}", name, fields)
        message.tool_calls = [*calls, call]

    def _call(self, place: str, name: str, fields: Mapping[str, str]) -> None:
        self.names[place] = name
        for known, called in fields.items():
            self.names[f"{place}.{known}"] = f"{name}.{called}".rstrip(".")


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
        error.public_message = error.public_message.replace(error.param, param)
        error.param, error.args = param, (error.public_message,)
        raise


def rename_parts(request: ApiRequest, names: Mapping[str, str]) -> None:
    """Let all that the guard is shown carry the client's names."""
    complete_guard_parts(request)
    for part in request.guard_parts:
        part.path = renamed(part.path, names)
