"""What a step hands out: per request the new tokens of its choices, and the counts so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_common.errors import HeadraceError
from headrace_worker.engine.request import Finish
from headrace_worker.sampling import Sampled


@dataclass
class ChoiceOutput:
    """What one step, or several merged, added to one choice.

    Args:
        choice_idx: which choice.
        tokens: new tokens; their log probabilities only where asked for.
        text: new text that may go out.
        finish: why the choice ended; None = it goes on.
        stop_matched: the stop string that ended it.
    """

    choice_idx: int
    tokens: list[Sampled] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    stop_matched: str = ""

    def merge(self, later: ChoiceOutput) -> None:
        """Append what came later."""
        self.tokens.extend(later.tokens)
        self.text += later.text
        self.finish = later.finish
        self.stop_matched = later.stop_matched


@dataclass(frozen=True)
class Usage:
    """Counts over the request's life, resumes included."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Times:
    """Seconds: accepted to scheduled, scheduled to first token, first to last token."""

    queue_s: float
    prefill_s: float
    decode_s: float
    num_preemptions: int


@dataclass
class RequestOutput:
    """What one step did for one request.

    Args:
        key: the request's number in this process.
        usage: counts after this step; None = not known here.
        choices: new tokens, by choice.
        queue_s: time from accepted to scheduled; only in the first output.
        prompt_logprobs: of the whole prompt, once it is computed, if asked for.
        embedding: of the prompt, of unit length; only in the last output and if asked for.
        times: only in the last output.
        error: why the request failed; then this is the last output.
        is_last: nothing follows.
    """

    key: int
    usage: Usage | None
    choices: list[ChoiceOutput] = field(default_factory=list)
    queue_s: float | None = None
    prompt_logprobs: list[Sampled] = field(default_factory=list)
    embedding: list[float] | None = None
    times: Times | None = None
    error: HeadraceError | None = None
    is_last: bool = False


# Called once per step on the engine's thread; must return at once.
Sink = Callable[[list[RequestOutput]], None]
