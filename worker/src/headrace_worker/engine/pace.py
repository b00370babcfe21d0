"""How many prompt tokens a step may take so that running streams keep their pace. Pure.

A prompt's chunk makes the step that carries it longer, and every running stream waits for that step
(Sarathi-Serve, arXiv 2403.02310, fixes the chunk's size; here it is chosen anew each step). What a
step without prompts takes, by the number of streams, and what chunks of some sizes add to it is
learned from the steps themselves. Nothing is assumed of the device but that a chunk takes no longer
per token than a smaller one, and that only of sizes that have not been tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from headrace_worker.engine.request import Priority, Request

# Even where it makes a step too long a prompt goes on by this much, so that none starves.
LEAST_TOKENS = 4
_KEPT_SAMPLES = 5
# Steps for which one sample is believed; five are for five times as long.
_STEPS_PER_SAMPLE = 64
# A chunk speaks for a size if it has at least this share of it.
_LEAST_SHARE = 0.85


class _Samples:
    """The last durations of one kind of step."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_KEPT_SAMPLES)
        self._noted_at = 0

    def add(self, value_s: float, now: int) -> None:
        self._values.append(value_s)
        self._noted_at = now

    def value(self, now: int) -> float | None:
        """Return the median, so that one slow step is no slow device; None if too old."""
        if now - self._noted_at > _STEPS_PER_SAMPLE * len(self._values):
            self._values.clear()
        return median(self._values) if self._values else None


class Pace:
    """Learns from steps and says how large the next chunk may be. One thread only.

    Args:
        slowdown_ratio: longest step while streams run, in steps without a prompt; for streams that
            do not say what they want.
        token_budget: most tokens in one step.
    """

    def __init__(self, slowdown_ratio: float, token_budget: int) -> None:
        self._slowdown_ratio, self._token_budget = slowdown_ratio, token_budget
        self._sizes = _sizes(token_budget)
        self._added_s = {size: _Samples() for size in self._sizes}
        self._decode_s: dict[int, _Samples] = {}
        self._num_noted = 0

    def most_prompt_tokens(self, streams: Sequence[Request]) -> int:
        """Return how many prompt tokens may join a step in which *streams* each get a token.

        A stream that says no TPOT and is of the class BATCH does not mind waiting. 0 once in a
        while: such a step shows what the streams take by themselves.
        """
        minding = [it for it in streams if it.tpot_slo_s or it.priority > Priority.BATCH]
        if not minding:
            return self._token_budget
        usual_s = self._usual_s(len(streams))
        if usual_s is None:
            return 0
        allowed_s = min(it.tpot_slo_s or self._slowdown_ratio * usual_s for it in minding)
        tried = self._tried()
        spare_s = allowed_s - usual_s
        fitting = [size for size in self._sizes if self._predicted_s(size, tried) <= spare_s]
        return max(fitting, default=self._sizes[0])

    def note(self, prompt_tokens: int, num_streams: int, duration_s: float) -> None:
        """Learn from a step."""
        self._num_noted += 1
        if not prompt_tokens:
            samples = self._decode_s.setdefault(_rounded_up(num_streams), _Samples())
            samples.add(duration_s, self._num_noted)
            return
        usual_s = self._usual_s(num_streams) if num_streams else 0.0
        size = next((size for size in self._sizes if size >= prompt_tokens), 0)
        if usual_s is not None and prompt_tokens >= _LEAST_SHARE * size:
            added_s = max(0.0, duration_s - usual_s)
            self._added_s[size].add(added_s * size / prompt_tokens, self._num_noted)

    def _usual_s(self, num_streams: int) -> float | None:
        samples = self._decode_s.get(_rounded_up(num_streams))
        return None if samples is None else samples.value(self._num_noted)

    def _tried(self) -> list[tuple[int, float]]:
        """Sizes that were tried lately, ascending, and what they added."""
        known = ((it, samples.value(self._num_noted)) for it, samples in self._added_s.items())
        return [(it, added_s) for it, added_s in known if added_s is not None]

    def _predicted_s(self, size: int, tried: Sequence[tuple[int, float]]) -> float:
        """What a chunk adds. Infinity where only larger ones were tried: the smallest is next.

        Infinity too for more than the next size above all that were tried: a small chunk that seems
        to add nothing, as it can beside steps that vary, says nothing of large ones.
        """
        below = [it for it in tried if it[0] <= size]
        above = [it for it in tried if it[0] > size]
        if not below:
            return float("inf")
        smaller, smaller_s = below[-1]
        if smaller == size:
            return smaller_s
        is_next = self._sizes.index(size) == self._sizes.index(smaller) + 1
        guesses = [smaller_s * size / smaller]
        if above:
            larger, larger_s = above[0]
            share = (size - smaller) / (larger - smaller)
            guesses.append(smaller_s + share * max(0.0, larger_s - smaller_s))
        elif not is_next:
            return float("inf")
        if is_next and len(below) == 1:
            # The next size is hoped to add as much: it has at most half as many tokens again, so a
            # hope that is dashed, once, costs half of what is allowed.
            guesses.append(smaller_s)
        elif is_next:
            before, before_s = below[-2]
            token_s = max(0.0, smaller_s - before_s) / (smaller - before)
            guesses.append(smaller_s + token_s * (size - smaller))
        # A token of a larger chunk costs no more than one of this.
        least_s = max((size * added_s / it for it, added_s in above), default=0.0)
        return max(least_s, min(guesses))


def _sizes(most: int) -> list[int]:
    """Chunks between which it is worth choosing, ascending."""
    sizes, size = [], LEAST_TOKENS
    while size < most:
        sizes += [size, size + size // 2]
        size *= 2
    return [*(size for size in sizes if size < most), most]


def _rounded_up(num_streams: int) -> int:
    return 1 << (num_streams - 1).bit_length()
