"""The choices of one output under way, and what the audit must know of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.classifiers.text_model import TextModels
from headrace_guard.output_check import OutputCheck, Released
from headrace_guard.plan import Plan
from headrace_guard.verdict import Finding, Reason, Verdict, judge

# As many as the public API allows for `n`.
MAX_CHOICES = 128
# Text kept per choice, for the hashes of what is found in it. Characters.
_MAX_KEPT_CHARS = 1_000_000


@dataclass(slots=True)
class ChoiceLog:
    """What came of one choice so far."""

    check: OutputCheck
    texts: list[str] = field(default_factory=list)
    num_chars: int = 0
    findings: list[Finding] = field(default_factory=list)
    missed: Reason | None = None
    elapsed_s: float = 0.0

    def verdict(self, plan: Plan) -> Verdict:
        """Return the verdict on all of it so far."""
        policy = plan.policy
        return judge(
            self.findings,
            policy.version,
            not_evaluated=self.missed,
            fails_open=policy.fails_open,
        )

    def note(self, text: str, released: Released, elapsed_s: float) -> None:
        """Remember one piece and what came of it."""
        if self.num_chars < _MAX_KEPT_CHARS:
            self.texts.append(text)
        self.num_chars += len(text)
        self.findings += released.findings
        self.missed = self.missed or released.not_evaluated
        self.elapsed_s += elapsed_s


class OutputSession:
    """All choices of one output.

    Args:
        plan: what to look for.
        max_held_chars: most undecided characters of one choice.
        models: trained classifiers; None = none are there.
    """

    def __init__(self, plan: Plan, max_held_chars: int, models: TextModels | None) -> None:
        self.plan = plan
        self._max_held_chars, self._models = max_held_chars, models
        self._choices: dict[int, ChoiceLog] = {}
        self._ended: set[int] = set()

    def choice(self, text: pb.OutputText) -> ChoiceLog:
        """Return the choice that *text* belongs to.

        Raises:
            InvalidRequest: it has ended, or there are too many.
        """
        choice_idx = text.choice_idx
        if choice_idx in self._ended:
            raise InvalidRequest(f"CheckOutput: choice {choice_idx} has ended")
        if text.last:
            self._ended.add(choice_idx)
        if choice_idx not in self._choices:
            self._begin(choice_idx)
        return self._choices[choice_idx]

    def resume(self, resume: pb.OutputResume) -> None:
        """Take over a choice of which some came out elsewhere.

        Raises:
            InvalidRequest: it has begun here, or there are too many.
        """
        if resume.choice_idx in self._choices:
            raise InvalidRequest(f"CheckOutput: choice {resume.choice_idx} has begun")
        self._begin(resume.choice_idx, resume.released_chars)

    def _begin(self, choice_idx: int, num_out_chars: int = 0) -> None:
        if len(self._choices) >= MAX_CHOICES:
            raise InvalidRequest(f"CheckOutput: more than {MAX_CHOICES} choices")
        self._choices[choice_idx] = ChoiceLog(
            OutputCheck(self.plan, choice_idx, self._max_held_chars, self._models, num_out_chars)
        )

    def logs(self) -> Iterator[tuple[int, ChoiceLog]]:
        """Yield each choice with its index."""
        yield from self._choices.items()
