"""Custom tools: their input is a text. Models are told of functions, and this is the bridge. Pure.

An input of any text is the one string in a function's arguments, as models write them; here it is
read out of the JSON piece by piece. An input with a grammar stands bare in the arguments' place, so
that the grammar holds for what the model writes. It is the last thing in an answer: within a text
nothing could be told from the end of a call.
"""

from __future__ import annotations

import json
import re

from headrace_gateway.api_request import CustomInput, Message
from headrace_gateway.openai_bodies import CustomDefinitionBody, GrammarFormat

_FIELD = "input"
_ANY_TEXT: Message = {
    "type": "object",
    "properties": {_FIELD: {"type": "string", "description": "The whole input, as plain text."}},
    "required": [_FIELD],
    "additionalProperties": False,
}
_BARE = (
    "Its arguments are not JSON: write the input itself in their place, as it is, without quotes "
    "and escapes, as the last thing in your answer. The input must match this {kind}:\n{definition}"
)
_KINDS = {"lark": "grammar", "regex": "regular expression"}
_BEGIN = re.compile(rf'\s*\{{\s*"{_FIELD}"\s*:\s*"')
# As much of a JSON string as can be read without what follows: surrogates come in pairs.
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_READABLE = re.compile(
    rf'(?:[^"\\]+|\\[^u]|{_HIGH}\\u[0-9a-fA-F]{{4}}|{_HIGH}(?=[^\\]|\\[^u])'
    rf"|(?!{_HIGH})\\u[0-9a-fA-F]{{4}})*"
)


def input_of(tool: CustomDefinitionBody) -> CustomInput:
    """Return what a tool's input must be."""
    if not isinstance(tool.format, GrammarFormat):
        return CustomInput()
    wanted = tool.format.grammar
    if wanted.syntax == "regex":
        return CustomInput(regex=wanted.definition)
    return CustomInput(grammar=wanted.definition)


def as_function(tool: CustomDefinitionBody) -> Message:
    """Return the function that a model is told of."""
    function: Message = {"name": tool.name}
    texts = [] if tool.description is None else [tool.description]
    if isinstance(tool.format, GrammarFormat):
        wanted = tool.format.grammar
        texts.append(_BARE.format(kind=_KINDS[wanted.syntax], definition=wanted.definition))
    if texts:
        function["description"] = "\n\n".join(texts)
    function["parameters"] = {"type": "string"} if input_of(tool).is_bare else _ANY_TEXT
    return function


def as_arguments(text: str, *, is_bare: bool) -> str | Message:
    """Return the arguments by which a model is shown an input that it gave earlier."""
    return text if is_bare else {_FIELD: text}


class InputReader:
    """Reads one input out of a call's arguments, the JSON of an object with one string."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = self._is_over = False

    def push(self, text: str) -> str:
        """Take more of the JSON; return what it brought of the input."""
        self._held += text
        if not self._is_inside:
            found = _BEGIN.match(self._held)
            if found is None:
                return ""
            self._is_inside, self._held = True, self._held[found.end() :]
        if self._is_over:
            return ""
        found = _READABLE.match(self._held)
        end = found.end() if found is not None else 0
        self._is_over = self._held[end : end + 1] == '"'
        read, self._held = self._held[:end], self._held[end:]
        return _unescaped(read)

    def finish(self) -> str:
        """The JSON has ended; return all of it if it was no such object (engines of others)."""
        return "" if self._is_inside else self._held


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    try:
        plain: str = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
    # A half of a pair has no bytes.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
