"""How fast the engine computes prompts and makes tokens, over its last steps."""

from __future__ import annotations

from collections import deque
from statistics import median

_NUM_STEPS = 64
# Few: the number of streams must be about the same in all of them.
_NUM_PURE_STEPS = 16
# A chunk smaller than this costs what reading the weights costs and says nothing about a rate.
_MIN_PREFILL_TOKENS = 64


class StepRates:
    """Tokens per second of prefill and decode; 0 = not measured yet.

    Prefill is measured on steps with at least 64 prompt tokens, or with a prompt that goes on in
    the next one: the tail of a prompt whose head was cached takes as long as a decode step and
    would make the device look ten times slower. So would a chunk that was cut short for the sake of
    running streams: such steps count only while there are no others.

    A mixed step counts for both with its whole duration, so both figures say what a request can
    expect under the present mix, not what the device could do.
    """

    def __init__(self) -> None:
        self._prefill: deque[tuple[int, float]] = deque(maxlen=_NUM_STEPS)
        self._cut_prefill: deque[tuple[int, float]] = deque(maxlen=_NUM_STEPS)
        self._decode: deque[tuple[int, float]] = deque(maxlen=_NUM_STEPS)
        self._pure_decode: deque[tuple[int, float]] = deque(maxlen=_NUM_PURE_STEPS)

    def add(
        self, prefill_tokens: int, decode_tokens: int, duration_s: float, *, goes_on: bool = False
    ) -> None:
        """Note one step; *goes_on* = some prompt is not at its end with it."""
        if prefill_tokens >= _MIN_PREFILL_TOKENS or (goes_on and not decode_tokens):
            self._prefill.append((prefill_tokens, duration_s))
        elif goes_on:
            self._cut_prefill.append((prefill_tokens, duration_s))
        if decode_tokens:
            self._decode.append((decode_tokens, duration_s))
            if not prefill_tokens:
                self._pure_decode.append((decode_tokens, duration_s))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second; the median step's, so one slow step is no slow device.

        A worker's first step is one: pages are touched for the first time.
        """
        steps = self._prefill or self._cut_prefill
        rates = [tokens / duration_s for tokens, duration_s in steps if duration_s > 0]
        return median(rates) if rates else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens generated per second, all streams together."""
        return _rate(self._decode)

    @property
    def decode_step_s(self) -> float:
        """Mean length of steps that only decoded."""
        steps = self._pure_decode
        return sum(duration_s for _, duration_s in steps) / len(steps) if steps else 0.0

    @property
    def decode_step_streams(self) -> float:
        """Mean number of tokens those steps made."""
        steps = self._pure_decode
        return sum(tokens for tokens, _ in steps) / len(steps) if steps else 0.0


def _rate(steps: deque[tuple[int, float]]) -> float:
    seconds = sum(duration_s for _, duration_s in steps)
    return sum(tokens for tokens, _ in steps) / seconds if seconds > 0 else 0.0
