r"""Judges a growing output and lets out what can no longer turn out to be forbidden.

Trained classifiers come first, if the policy asks for them (`headrace_guard.model_gate`), then two
scanners in a row. The first looks for what must not get out (block, redact) and holds text
back while it is undecided; the second looks at what the first lets out for things that are only
reported, and holds nothing back. Without anything to hold, text passes at once.

States of one choice::

    open --end of text--> done
      \\--block, or could not look and fail-closed--> stopped (everything held is dropped)

Properties (tests/test_output_check_properties.py), for every way of cutting the text: the released
text and the findings are the same; no blocked span, nor its beginning, is ever released; released
never passes scanned; without a finding the bytes are the same; held text is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from headrace_guard.classifiers.base import Match
from headrace_guard.classifiers.text_model import TextModels
from headrace_guard.deadline import Deadline, OutOfTimeError
from headrace_guard.model_gate import ModelGate
from headrace_guard.plan import Plan
from headrace_guard.redact import BEFORE_CHARS, clusters, placeholder
from headrace_guard.stream_scan import Settled, StreamScanner
from headrace_guard.verdict import Action, Finding, Reason, Verdict, judge


@dataclass(slots=True)
class Released:
    """What one piece of text led to.

    Args:
        text: may go to the client.
        findings: new ones, in order.
        not_evaluated: why something was not judged.
        is_over: nothing more comes out of this choice.
    """

    text: str = ""
    findings: list[Finding] = field(default_factory=list)
    not_evaluated: Reason | None = None
    is_over: bool = False


class OutputCheck:
    """Judges one choice. Not safe for use by two threads at a time.

    Args:
        plan: what to look for.
        choice_idx: goes into findings.
        max_held_chars: most undecided characters.
        models: trained classifiers; None = none are there.
        num_out_chars: characters from the beginning that are out already and not released again.
    """

    def __init__(
        self,
        plan: Plan,
        choice_idx: int,
        max_held_chars: int,
        models: TextModels | None = None,
        num_out_chars: int = 0,
    ) -> None:
        self._plan, self._choice_idx = plan, choice_idx
        self.num_out_chars = num_out_chars
        self._gate = _gate(plan, models)
        # The policy asks for classifiers that are not there: nothing can be judged.
        self._lacks_models = plan.asked is not None and models is None
        self._holder = StreamScanner(plan.holding, max_held_chars)
        self._watcher = StreamScanner(plan.watching, max_held_chars)
        self._num_released_chars = 0
        # Length of what came out, placeholders and what was out already included.
        self.num_text_chars = 0
        # The end of what was let out.
        self._tail = ""
        self._num_dropped_chars = 0
        self.is_over = False

    @property
    def num_scanned_chars(self) -> int:
        """Characters of the output that were read."""
        read = self._gate.num_scanned_chars if self._gate else self._holder.num_scanned_chars
        return read + self._num_dropped_chars

    @property
    def num_released_chars(self) -> int:
        """Characters of the output that came out, as they were or redacted."""
        return self._num_released_chars

    @property
    def num_held_chars(self) -> int:
        """Characters that wait for what follows."""
        if self.is_over:
            return 0
        return self._holder.num_held_chars + (self._gate.num_held_chars if self._gate else 0)

    def feed(self, text: str, is_last: bool, deadline: Deadline) -> Released:
        """Judge more text. After the end, text is counted and dropped."""
        if self._lacks_models:
            return self.pass_unseen(text, is_last, Reason.NO_MODEL)
        released = Released()
        if self.is_over:
            self._num_dropped_chars += len(text)
            return released
        before = self._gate.num_scanned_chars if self._gate else 0
        try:
            if self._gate is None:
                self._hold(text, deadline, released)
            else:
                self._feed_gate(self._gate, text, is_last, deadline, released)
            if is_last and not self.is_over:
                self._take(self._holder.finish(), released)
        except _OutOfTimeError as error:
            rest, ahead = error.rest, ""
            if self._gate is not None:
                rest, ahead = text[self._gate.num_scanned_chars - before :], error.rest
            return self.pass_unseen(rest, is_last, Reason.OUT_OF_TIME, released, ahead=ahead)
        if is_last and not self.is_over:
            self._end(released)
        return released

    def _hold(self, text: str, deadline: Deadline, released: Released) -> None:
        done = 0
        while done < len(text) and not self.is_over:
            try:
                deadline.check()
            except OutOfTimeError as error:
                raise _OutOfTimeError(text[done:]) from error
            piece = text[done : done + self._holder.room()]
            done += len(piece)
            self._take(self._holder.feed(piece), released)
        if self._gate is None:
            self._num_dropped_chars += len(text) - done

    def _feed_gate(
        self, gate: ModelGate, text: str, is_last: bool, deadline: Deadline, released: Released
    ) -> None:
        before = gate.num_scanned_chars
        for judged in chain(gate.feed(text), gate.finish() if is_last else ()):
            self._hold(judged.text, deadline, released)
            if not self.is_over:
                self._report(judged.matches, released)
                if judged.is_blocked:
                    self._stop(released)
            if self.is_over:
                break
        self._num_dropped_chars += len(text) - (gate.num_scanned_chars - before)

    def pass_unseen(
        self,
        text: str,
        is_last: bool,
        reason: Reason,
        released: Released | None = None,
        *,
        ahead: str = "",
    ) -> Released:
        """Take text that could not be judged: stop if the policy is fail-closed, or let it out.

        Args:
            text: is new.
            is_last: nothing follows.
            reason: why it could not be judged.
            released: what came out before it.
            ahead: comes before *text*; trained classifiers have seen it, nothing else has.
        """
        released = released or Released()
        if self.is_over:
            self._num_dropped_chars += len(text)
            return released
        if self._plan.policy.fails_open:
            released.not_evaluated = reason
            skipped = self._gate.skip(text) if self._gate is not None else text
            settled = self._holder.skip(ahead + skipped)
            self._watcher.skip(settled.text)
            self._let_out(settled.text, released)
            if is_last:
                self._end(released)
        else:
            self._num_dropped_chars += len(text)
            self._stop(released, reason)
        return released

    def verdict(self, released: Released) -> Verdict | None:
        """Return the verdict on one result; None if nothing was found and all was seen."""
        if not released.findings and released.not_evaluated is None:
            return None
        return judge(
            released.findings,
            self._plan.policy.version,
            not_evaluated=released.not_evaluated,
            fails_open=self._plan.policy.fails_open,
        )

    def _take(self, settled: Settled, released: Released) -> None:
        self._let_out_judged(settled, released)
        if settled.is_stuck and not self.is_over:
            self._unstick(released)

    def _unstick(self, released: Released) -> None:
        settled = self._holder.give_up()
        if settled.matches:
            # A match up to the bound has no end (a huge key): that much of it is enough.
            self._report(settled.matches, released, at_least=Action.BLOCK)
            self._stop(released)
        elif self._plan.policy.fails_open:
            released.not_evaluated = Reason.UNDECIDED
            self._let_out_watched(settled.text, released)
        else:
            self._stop(released, Reason.UNDECIDED)

    def _let_out_judged(self, settled: Settled, released: Released) -> None:
        done = settled.start
        for group in clusters(settled.matches):
            begin, end = group[0].start, max(match.end for match in group)
            self._let_out_watched(settled.slice(done, begin), released)
            if self.is_over:
                return
            self._report(group, released)
            if any(self._action(match) is Action.BLOCK for match in group):
                self._stop(released)
                return
            instead = placeholder(group[0].category, settled.slice(begin, end), self._tail)
            self._let_out(instead, released, end - begin)
            self._watch(settled.slice(begin, end), released)
            done = end
        self._let_out_watched(settled.slice(done, settled.start + len(settled.text)), released)

    def _let_out_watched(self, text: str, released: Released) -> None:
        done = 0
        while done < len(text) and not self.is_over:
            piece = text[done : done + self._watcher.room()]
            done += len(piece)
            self._let_out(piece, released)
            self._watch(piece, released)

    def _let_out(self, text: str, released: Released, num_replaced: int | None = None) -> None:
        """Release *text*, or what of it is not out; it may stand for some original characters."""
        num_out = max(0, self.num_out_chars - self._num_released_chars)
        self.num_text_chars += len(text)
        self._tail = (self._tail + text[-BEFORE_CHARS:])[-BEFORE_CHARS:]
        if num_replaced is None:
            released.text += text[num_out:]
            self._num_released_chars += len(text)
        else:
            released.text += text if num_out < num_replaced else ""
            self._num_released_chars += num_replaced

    def _watch(self, text: str, released: Released) -> None:
        done = 0
        while done < len(text) and not self.is_over:
            piece = text[done : done + self._watcher.room()]
            done += len(piece)
            settled = self._watcher.feed(piece)
            self._report(settled.matches, released)
            if settled.is_stuck:
                self._give_up_watching(released)

    def _give_up_watching(self, released: Released) -> None:
        matches = self._watcher.give_up().matches
        self._report(matches, released)
        if not matches and self._plan.policy.fails_open:
            released.not_evaluated = Reason.UNDECIDED
        elif not matches:
            self._stop(released, Reason.UNDECIDED)

    def _stop(self, released: Released, reason: Reason | None = None) -> None:
        released.not_evaluated = reason or released.not_evaluated
        self._end(released)

    def _end(self, released: Released) -> None:
        self._report(self._watcher.finish().matches, released)
        self.is_over = released.is_over = True

    def _report(
        self, matches: Sequence[Match], released: Released, at_least: Action = Action.OFF
    ) -> None:
        for match in matches:
            finding = self._plan.finding(match, self._choice_idx)
            if finding.action < at_least:
                finding = replace(finding, action=at_least)
            released.findings.append(finding)

    def _action(self, match: Match) -> Action:
        return self._plan.policy.action(self._plan.direction, match.category)


class _OutOfTimeError(Exception):
    """The time was over before this much text was judged."""

    def __init__(self, rest: str) -> None:
        super().__init__()
        self.rest = rest


def _gate(plan: Plan, models: TextModels | None) -> ModelGate | None:
    if plan.asked is None or models is None:
        return None
    blocking = frozenset(
        category
        for category in plan.asked.points
        if plan.policy.action(plan.direction, category) in (Action.REDACT, Action.BLOCK)
    )
    return ModelGate(models, plan.asked, blocking)
