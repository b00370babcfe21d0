"""An answer that is collected and sent at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.worker.v1.worker_pb2 import TokenLogprob
from headrace_gateway.answer_format import AnswerFormat, CallAnswer, ChoiceAnswer
from headrace_gateway.api_request import Shown
from headrace_gateway.visit import Exchange


class WholeAnswer:
    """Collects one answer and sends it as JSON.

    Args:
        exchange: the connection.
        form: the endpoint's shape.
        shown: whether the prompt comes first, and how many choices of each prompt are kept.
        num_made: choices made of each prompt.
    """

    def __init__(
        self, exchange: Exchange, form: AnswerFormat, shown: Shown, num_made: int = 1
    ) -> None:
        self._exchange, self._form = exchange, form
        self._echoes, self._num_best, self._num_made = shown.echo, shown.num_best, num_made
        self._choices: list[ChoiceAnswer] = []
        self._texts: list[list[str]] = []

    async def begin(self, num_choices: int) -> None:
        """Make room for the choices."""
        self._choices = [ChoiceAnswer() for _ in range(num_choices)]
        self._texts = [[] for _ in range(num_choices)]

    def add_text(self, choice_idx: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> None:
        """Keep text."""
        if self._echoes and not self._texts[choice_idx]:
            self._choices[choice_idx].num_echoed = len(logprobs or ())
        self._texts[choice_idx].append(text)
        if logprobs:
            self._choices[choice_idx].logprobs.extend(logprobs)

    def add_call(self, choice_idx: int, call_idx: int, name: str) -> None:
        """Begin a call."""
        del call_idx  # calls come in order
        self._choices[choice_idx].calls.append(CallAnswer(name))

    def add_arguments(self, choice_idx: int, call_idx: int, text: str) -> None:
        """Keep more of a call's arguments."""
        self._choices[choice_idx].calls[call_idx].arguments += text

    def add_finish(self, choice_idx: int, reason: str, stop_matched: str = "") -> None:
        """Keep a choice's end."""
        self._choices[choice_idx].finish_reason = reason

    async def flush(self) -> None:
        """Nothing is sent before the end."""

    def try_flush(self) -> bool:
        """Nothing is sent before the end."""
        return True

    async def end(self, usage: TokenUsage) -> None:
        """Send everything."""
        for choice, texts in zip(self._choices, self._texts, strict=True):
            choice.text = "".join(texts)
        choices = self._best() if self._num_best else self._choices
        await self._exchange.send_json(200, self._form.whole(choices, usage))

    async def keep_alive(self, every_s: float) -> None:
        """Nothing is sent before the end."""

    def _best(self) -> list[ChoiceAnswer]:
        best: list[ChoiceAnswer] = []
        for start in range(0, len(self._choices), self._num_made):
            made = self._choices[start : start + self._num_made]
            best += sorted(made, key=_mean_logprob, reverse=True)[: self._num_best]
        return best


def _mean_logprob(choice: ChoiceAnswer) -> float:
    made = choice.logprobs[choice.num_echoed :]
    return sum(token.logprob for token in made) / len(made) if made else -math.inf
