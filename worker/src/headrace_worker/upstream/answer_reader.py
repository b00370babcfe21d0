"""Pure: the server's events as GenerateEvents.

Calls of functions come as objects; here they are spelled into the text as every worker spells them,
so that whoever reads the answer reads it in one way. Usage comes at the end, or with each event
from servers that do so; until then it is estimated, one token an event, and marked so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_common.errors import Unavailable
from headrace_contracts.types.v1.types_pb2 import ReplicaRef, TokenUsage
from headrace_contracts.worker.v1 import worker_pb2 as pb

Json = dict[str, Any]  # Any: JSON values
_STOPS = {"length": pb.FINISH_REASON_LENGTH}
_LEAST_LOGPROB = -1e9


@dataclass(slots=True)
class _Choice:
    """What is known of a choice: the calls in it are open until the next one or the end."""

    open_call: int | None = None
    finish: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED


@dataclass
class AnswerReader:
    """Reads one answer.

    Args:
        replica: who serves.
        request: what was asked.
    """

    replica: ReplicaRef
    request: pb.GenerateRequest
    usage: TokenUsage = field(default_factory=TokenUsage)
    is_estimate: bool = True
    has_started: bool = False

    def __post_init__(self) -> None:
        self._choices = [_Choice() for _ in range(self.request.n or 1)]
        self.usage.prompt_tokens = self.request.text.estimated_tokens

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish for choice in self._choices)

    @property
    def finish(self) -> pb.FinishReason.ValueType:
        """Why the first choice ended."""
        return self._choices[0].finish

    def read(self, chunk: Json) -> pb.GenerateEvent:
        """Translate one chunk. Ends of choices are held back: usage may follow them.

        Raises:
            Unavailable: it is an error, or not an answer at all.
        """
        if "error" in chunk:
            raise Unavailable("The engine behind this model failed.", retry_after_s=1.0)
        event = pb.GenerateEvent()
        if not self.has_started:
            self.has_started = True
            event.started.replica.CopyFrom(self.replica)
        try:
            for part in chunk.get("choices") or ():
                self._read_choice(event, part)
            self._read_usage(chunk.get("usage"))
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise Unavailable("The engine behind this model answers in no known form.") from error
        return self._counted(event)

    def last(self) -> pb.GenerateEvent:
        """Return the event with which every choice ends."""
        event = pb.GenerateEvent(timings=pb.Timings())
        for idx, choice in enumerate(self._choices):
            event.deltas.append(
                pb.ChoiceDelta(choice_idx=idx, text=_end_call(choice), finish_reason=choice.finish)
            )
        return self._counted(event)

    def _counted(self, event: pb.GenerateEvent) -> pb.GenerateEvent:
        event.usage.CopyFrom(self.usage)
        event.usage_is_estimate = self.is_estimate
        return event

    def _read_choice(self, event: pb.GenerateEvent, part: Json) -> None:
        choice_idx = int(part.get("index") or 0)
        choice = self._choices[choice_idx]
        said = part.get("delta") or {}
        text = str(part.get("text") or said.get("content") or "")
        for call in said.get("tool_calls") or ():
            text += _spell(choice, call)
        logprobs = _read_logprobs(part.get("logprobs"))
        if text or logprobs:
            event.deltas.append(pb.ChoiceDelta(choice_idx=choice_idx, text=text, logprobs=logprobs))
            if self.is_estimate:
                self.usage.output_tokens += max(1, len(logprobs))
        reason = part.get("finish_reason")
        if reason:
            choice.finish = _STOPS.get(reason, pb.FINISH_REASON_STOP)

    def _read_usage(self, told: Json | None) -> None:
        if not told or not told.get("prompt_tokens"):
            return
        cached = (told.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        hidden = (told.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
        prompt_tokens, output_tokens = int(told["prompt_tokens"]), int(told["completion_tokens"])
        self.usage = TokenUsage(
            prompt_tokens=prompt_tokens,
            # The last token of a prompt is always computed.
            cached_gpu_tokens=max(0, min(int(cached), prompt_tokens - 1)),
            output_tokens=output_tokens,
            reasoning_tokens=min(int(hidden), output_tokens),
        )
        self.is_estimate = False


def _spell(choice: _Choice, call: Json) -> str:
    """Return what a piece of a call adds to the text."""
    function, call_idx = call.get("function") or {}, int(call.get("index") or 0)
    text = ""
    if choice.open_call != call_idx:
        text = _end_call(choice)
        choice.open_call = call_idx
        name = json.dumps(str(function["name"]))
        text += f'<tool_call>\n{{"name": {name}, "arguments": '
    return text + str(function.get("arguments") or "")


def _end_call(choice: _Choice) -> str:
    if choice.open_call is None:
        return ""
    choice.open_call = None
    return "}\n</tool_call>\n"


def _read_logprobs(told: Json | None) -> list[pb.TokenLogprob]:
    if not told:
        return []
    if told.get("content") is not None:
        return [_of_chat(token) for token in told["content"]]
    tokens, values = told.get("tokens") or (), told.get("token_logprobs") or ()
    tops: Sequence[Json | None] = told.get("top_logprobs") or [None] * len(tokens)
    return [
        pb.TokenLogprob(
            token=str(token).encode(),
            logprob=_finite(value),
            top=[
                pb.TokenLogprob(token=str(other).encode(), logprob=_finite(it))
                for other, it in (top or {}).items()
            ],
        )
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]


def _of_chat(told: Json) -> pb.TokenLogprob:
    raw = told.get("bytes")
    return pb.TokenLogprob(
        token=bytes(raw) if raw is not None else str(told["token"]).encode(),
        logprob=_finite(told["logprob"]),
        top=[_of_chat(other) for other in told.get("top_logprobs") or ()],
    )


def _finite(value: float | None) -> float:
    return max(_LEAST_LOGPROB, float(value)) if value is not None else 0.0
