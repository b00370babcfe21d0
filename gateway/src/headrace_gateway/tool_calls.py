"""Reads calls of functions out of a model's text, piece by piece. Pure.

::

    TEXT --<tool_call>--> HEAD --{"name": "f", "arguments": --> ARGUMENTS --value ends--> TAIL
      ^                     |  anything else: it was text                                 |
      '---------------------+-------------------------------------------- </tool_call> --'
                            '- of a bare input: BARE, to the end of the answer

Text goes out at once, but for what may begin a call and the blanks before it. A call's arguments go
out as they come, so a client sees valid JSON as far as the model made any; the input of a custom
tool (`custom_tools`) goes out as the text that it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace_gateway.api_request import CustomInput
from headrace_gateway.custom_tools import InputReader
from headrace_gateway.tool_prompt import CALL_BEGIN, CALL_END

# A name and the words around it; beyond that it is no call.
_MAX_HEAD_CHARS = 512
_NAMED = r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:'
_HEAD = re.compile(_NAMED + r"\s*(?=\{)")
_BARE_HEAD = re.compile(_NAMED + " ")
_STRUCTURE = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True, slots=True)
class CallStart:
    """The next call of a choice has a name."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the latest call: a part of a JSON text, or of a custom input."""

    text: str


# A plain string is text beside the calls.
Piece = str | CallStart | CallArguments


class ToolCallReader:
    """Reads one choice's text.

    Args:
        customs: tools whose arguments are an input, by name.
    """

    def __init__(self, customs: Mapping[str, CustomInput] | None = None) -> None:
        self.num_calls = 0
        self._customs = customs or {}
        # Of the latest call, if its arguments are JSON around an input.
        self._input: InputReader | None = None
        self._state = self._text
        self._buffer = ""
        # Within arguments: open brackets, inside a string, behind a backslash.
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._is_after_call = False

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what it brought."""
        self._buffer += text
        return list(self._run())

    def finish(self) -> list[Piece]:
        """Return what was held back: no more text follows."""
        held, self._buffer = self._buffer, ""
        if self._state == self._text:
            return [held] if held and not self._is_after_call else []
        # Cut before it has a name a call is no call, and its spelling no text for the client.
        is_text = self._state == self._head and held.lstrip()[:1] not in ("", "{")
        return [CALL_BEGIN + held] if is_text else []

    def _run(self) -> Iterator[Piece]:
        state = None
        while state != self._state or self._buffer:
            state, before = self._state, len(self._buffer)
            yield from self._state()
            if state == self._state and before == len(self._buffer):
                return

    def _text(self) -> Iterator[Piece]:
        begin = self._buffer.find(CALL_BEGIN)
        if begin >= 0:
            yield from self._plain(self._buffer[:begin].rstrip())
            self._buffer = self._buffer[begin + len(CALL_BEGIN) :]
            self._state = self._head
            return
        border = _border(self._buffer)
        yield from self._plain(self._buffer[:border])
        self._buffer = self._buffer[border:]

    def _plain(self, text: str) -> Iterator[Piece]:
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._is_after_call = False
            yield text

    def _head(self) -> Iterator[Piece]:
        found = self._found_head()
        if found is not None:
            self._buffer = self._buffer[found.end() :]
            self._depth, self._in_string, self._is_escaped = 0, False, False
            self.num_calls += 1
            name = _unquoted(found[1])
            custom = self._customs.get(name)
            self._input = None if custom is None else InputReader()
            self._state = self._bare if custom is not None and custom.is_bare else self._arguments
            yield CallStart(name)
        elif len(self._buffer) > _MAX_HEAD_CHARS or CALL_END in self._buffer:
            # What follows may hold a call again.
            self._state = self._text
            self._is_after_call = False
            yield CALL_BEGIN

    def _found_head(self) -> re.Match[str] | None:
        bare = _BARE_HEAD.match(self._buffer) if self._customs else None
        if bare is not None and (custom := self._customs.get(_unquoted(bare[1]))) is not None:
            return bare if custom.is_bare else _HEAD.match(self._buffer)
        return _HEAD.match(self._buffer)

    def _bare(self) -> Iterator[Piece]:
        text, self._buffer = self._buffer, ""
        if text:
            yield CallArguments(text)

    def _arguments(self) -> Iterator[Piece]:
        end = self._value_end()
        text = self._buffer if end is None else self._buffer[:end]
        self._buffer = self._buffer[len(text) :]
        told = text if self._input is None else self._input.push(text)
        if told:
            yield CallArguments(told)
        if end is not None:
            self._state = self._tail
            if self._input is not None and (rest := self._input.finish()):
                yield CallArguments(rest)

    def _value_end(self) -> int | None:
        """Return where the JSON value ends in the buffer; None = not yet."""
        idx, text = 0, self._buffer
        while idx < len(text):
            if self._is_escaped:
                self._is_escaped = False
                idx += 1
                continue
            found = _STRUCTURE.search(text, idx)
            if found is None:
                return None
            idx = found.end()
            self._take(found[0])
            if self._depth <= 0 and not self._in_string:
                return idx
        return None

    def _take(self, char: str) -> None:
        if self._in_string:
            self._is_escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _tail(self) -> Iterator[Piece]:
        end = self._buffer.find(CALL_END)
        if end < 0:
            # Only the closing brace may stand here; whatever else is no text for the client.
            self._buffer = self._buffer[-len(CALL_END) :]
            return
        self._buffer = self._buffer[end + len(CALL_END) :]
        self._is_after_call = True
        self._state = self._text
        yield from ()


def _border(text: str) -> int:
    """Return where that begins which may be the blanks before a call and a part of its spelling."""
    end = len(text)
    for length in range(min(end, len(CALL_BEGIN) - 1), 0, -1):
        if text.endswith(CALL_BEGIN[:length]):
            end -= length
            break
    return len(text[:end].rstrip())


def call_id(answer_id: str, choice_idx: int, call_idx: int, prefix: str = "call_") -> str:
    """Return the id of a call: the same each time the same answer is read."""
    name = f"{answer_id}/{choice_idx}/{call_idx}".encode()
    return prefix + hashlib.blake2b(name, digest_size=12).hexdigest()


def _unquoted(quoted: str) -> str:
    try:
        text: str = json.loads(quoted)
    except ValueError:
        return quoted[1:-1]
    return text
