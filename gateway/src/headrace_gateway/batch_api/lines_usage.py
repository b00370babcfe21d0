"""What a batch's answers used, added up from the lines of its output file. Pure."""

from __future__ import annotations

import msgspec

from headrace_gateway.answer_extras import Json


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    # None of embeddings.
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    response: _Response


_DECODER = msgspec.json.Decoder(_Line)


class LinesUsage:
    """The sum over answered lines, in the words of OpenAI's batches. Tokens."""

    def __init__(self) -> None:
        self._input = self._cached = self._output = self._reasoning = 0

    def add(self, line: bytes) -> None:
        """Count a line of the output file."""
        usage = _DECODER.decode(line).response.body.usage
        if usage is None:
            return
        self._input += usage.prompt_tokens
        self._output += usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self._cached += usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens_details is not None:
            self._reasoning += usage.completion_tokens_details.reasoning_tokens

    def as_json(self) -> Json:
        """Return the public object."""
        return {
            "input_tokens": self._input,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._input + self._output,
        }
