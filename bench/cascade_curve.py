"""The head of a cascade, learned and measured: numpy and nothing else."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_gateway.model_routes.cascade import BITS, CascadeHead, HeadFile, features

_STEPS, _RATE, _DECAY = 600, 0.5, 2e-3
_RESAMPLES = 2000
_SEED = 7
# Shares of requests sent to the large model, of which the curve is drawn.
_SHARES = tuple(share / 20 for share in range(21))


@dataclass(frozen=True)
class Answered:
    """What one model said to one task.

    Args:
        kind: of the task.
        prompt: what was asked.
        text: what it said.
        right: whether that is the answer.
        prompt_tokens: counted by its own tokenizer.
        output_tokens: likewise.
    """

    kind: str
    prompt: str
    text: str
    right: bool
    prompt_tokens: int
    output_tokens: int


# What both models said to one task: the small one, the large one.
Pair = tuple[Answered, Answered]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Learned:
    """A head before it is written down."""

    weights: Floats
    bias: float

    def scores(self, pairs: Sequence[Pair]) -> Floats:
        """Score tasks, as the gateway will."""
        head = CascadeHead(HeadFile.model_validate(self.file(_NOTHING)))
        return np.array([head.score(small.prompt) for small, _ in pairs])

    def file(self, measured: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        """Return the head as it is stored: one signed byte a weight."""
        scale = float(np.abs(self.weights).max()) / 127 or 1.0
        raw = np.round(self.weights / scale).astype(np.int8).tobytes()
        return {
            "version": 1,
            "bits": BITS,
            "bias": round(self.bias, 6),
            "scale": scale,
            "weights": base64.b64encode(raw).decode(),
            "measured": measured,
        }


_NOTHING: dict[str, Any] = {  # Any: JSON
    "small": "-", "large": "-", "num_tasks": 1, "small_ratio": 0, "large_ratio": 0,
    "oracle_ratio": 0, "cascade_ratio": 0, "large_share_ratio": 0, "gain_ratio": 0,
    "gain_low_ratio": 0, "gain_high_ratio": 0, "threshold": 0,
}  # fmt: skip


def learn(pairs: Sequence[Pair]) -> Learned:
    """Fit a logistic head to the gain.

    1 = only the large model is right, 0 = only the small one, a half = it makes no difference.
    """
    inputs = np.zeros((len(pairs), 1 << BITS))
    for row, (small, _) in enumerate(pairs):
        buckets = features(small.prompt)
        inputs[row, buckets] = 1 / math.sqrt(len(buckets))
    wanted = np.array([(1 + large.right - small.right) / 2 for small, large in pairs])
    used = np.flatnonzero(inputs.any(axis=0))
    inputs = inputs[:, used]
    weights, bias, speed = np.zeros(len(used)), 0.0, np.zeros(len(used))
    for _ in range(_STEPS):
        error = 1 / (1 + np.exp(-(inputs @ weights + bias))) - wanted
        speed = 0.9 * speed - _RATE * (inputs.T @ error / len(pairs) * 8 + _DECAY * weights)
        weights += speed
        bias -= _RATE * float(error.mean())
    whole = np.zeros(1 << BITS)
    whole[used] = weights
    return Learned(whole, bias)


def threshold_of(pairs: Sequence[Pair], heads: Sequence[Learned]) -> float:
    """Return where the sum of right answers is highest, by heads that have not seen the task.

    Args:
        pairs: what the first head was trained on.
        heads: trained on all, on the even and on the odd ones.
    """
    scores = np.zeros(len(pairs))
    scores[0::2] = heads[2].scores(pairs[0::2])
    scores[1::2] = heads[1].scores(pairs[1::2])
    small, large = _right(pairs)
    grid = np.unique(scores)
    sums = [np.where(scores >= at, large, small).sum() for at in grid]
    # Of equal ones the dearest threshold: the fewest requests for the large model.
    best = max(range(len(grid)), key=lambda idx: (sums[idx], grid[idx]))
    nobody = small.sum() >= sums[best]
    return 1.0 if nobody else round(float(grid[best]), 6)


def _right(pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
    return (
        np.array([float(small.right) for small, _ in pairs]),
        np.array([float(large.right) for _, large in pairs]),
    )


class Measurement:
    """What a head does on tasks that it has not seen.

    Args:
        pairs: those tasks.
        head: who chooses.
        price_ratio: price of a token, large : small.
        threshold: from where the large model is asked.
    """

    def __init__(
        self, pairs: Sequence[Pair], head: Learned, price_ratio: float, threshold: float
    ) -> None:
        self._pairs, self._threshold = pairs, threshold
        self._small, self._large = _right(pairs)
        self._scores = head.scores(pairs)
        self._costs = (
            np.array([float(a.prompt_tokens + a.output_tokens) for a, _ in pairs]),
            np.array([price_ratio * (b.prompt_tokens + b.output_tokens) for _, b in pairs]),
        )

    def measured(self, small_name: str, large_name: str) -> dict[str, Any]:  # Any: JSON
        """Return what goes into the head's file."""
        goes = self._scores >= self._threshold
        low, high = self._interval(goes)
        return {
            "small": small_name,
            "large": large_name,
            "num_tasks": len(self._pairs),
            "small_ratio": round(float(self._small.mean()), 4),
            "large_ratio": round(float(self._large.mean()), 4),
            "oracle_ratio": round(float(np.maximum(self._small, self._large).mean()), 4),
            "cascade_ratio": round(float(np.where(goes, self._large, self._small).mean()), 4),
            "large_share_ratio": round(float(goes.mean()), 4),
            "gain_ratio": round(self._gain(goes, slice(None)), 4),
            "gain_low_ratio": round(low, 4),
            "gain_high_ratio": round(high, 4),
            "threshold": self._threshold,
        }

    def rows(self) -> list[tuple[float, float, float, float, float]]:
        """Return the curve.

        A row: share of the large model, cost (all small = 1), right answers: the head's, a draw's
        and the oracle's.
        """
        rows = []
        by_score = np.argsort(-self._scores, kind="stable")
        by_need = np.argsort(self._small - self._large, kind="stable")
        for share in _SHARES:
            num = round(share * len(self._pairs))
            goes = self._first(by_score, num)
            drawn = float((1 - share) * self._small.mean() + share * self._large.mean())
            best = self._first(by_need, num)
            rows.append((share, self._cost(goes), self._quality(goes), drawn, self._quality(best)))
        return rows

    def table(self) -> str:
        """Return the curve, and what each kind of task takes, as markdown."""
        facts = self.measured("small", "large")
        lines = [f"- {name}: {value}" for name, value in facts.items()]
        lines += [
            "",
            "| share to large | cost | cascade | random | oracle |",
            "|---|---|---|---|---|",
        ]
        for share, *values in self.rows()[::2]:
            lines.append(f"| {share:.1f} | " + " | ".join(f"{it:.3f}" for it in values) + " |")
        lines += ["", "| kind | tasks | small | large | sent to large |", "|---|---|---|---|---|"]
        goes = self._scores >= self._threshold
        kinds = np.array([small.kind for small, _ in self._pairs])
        for kind in sorted(set(kinds)):
            of = kinds == kind
            cells = (self._small[of].mean(), self._large[of].mean(), goes[of].mean())
            lines.append(
                f"| {kind} | {of.sum()} | " + " | ".join(f"{it:.2f}" for it in cells) + " |"
            )
        return "\n".join(lines)

    def svg(self) -> str:
        """Return the curve as a picture."""
        rows = self.rows()
        values = [value for row in rows for value in row[2:]]
        low, high = min(values), max(values)
        first, last = min(row[1] for row in rows), max(row[1] for row in rows)

        def line(column: int, colour: str) -> str:
            points = " ".join(
                f"{60 + 400 * (row[1] - first) / (last - first):.1f},"
                f"{260 - 230 * (row[column] - low) / (high - low):.1f}"
                for row in rows
            )
            return f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'

        def text(x: int, y: int, said: str, colour: str = "#333") -> str:
            return f'<text x="{x}" y="{y}" fill="{colour}">{said}</text>'

        return "\n".join(
            [
                '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 310" '
                'font-family="sans-serif" font-size="12">',
                '<path d="M60 20V260H465" fill="none" stroke="#999"/>',
                line(4, "#2a7"),
                line(2, "#27c"),
                line(3, "#c52"),
                text(8, 34, f"{high:.2f}"),
                text(8, 262, f"{low:.2f}"),
                text(55, 278, f"{first:.2f}"),
                text(440, 278, f"{last:.2f}"),
                text(150, 300, "mean cost of a request, all small = 1"),
                text(65, 14, "right answers:"),
                text(160, 14, "oracle", "#2a7"),
                text(210, 14, "cascade", "#27c"),
                text(270, 14, "random", "#c52"),
                "</svg>\n",
            ]
        )

    def _first(self, order: NDArray[np.intp], num: int) -> NDArray[np.bool_]:
        goes = np.zeros(len(self._pairs), dtype=np.bool_)
        goes[order[:num]] = True
        return goes

    def _quality(self, goes: NDArray[np.bool_]) -> float:
        return float(np.where(goes, self._large, self._small).mean())

    def _cost(self, goes: NDArray[np.bool_]) -> float:
        small, large = self._costs
        return float(np.where(goes, large, small).mean() / small.mean())

    def _gain(self, goes: NDArray[np.bool_], which: Any) -> float:  # Any: an index of numpy's
        small, large, sent = self._small[which], self._large[which], goes[which]
        drawn = (1 - sent.mean()) * small.mean() + sent.mean() * large.mean()
        return float(np.where(sent, large, small).mean() - drawn)

    def _interval(self, goes: NDArray[np.bool_]) -> tuple[float, float]:
        draw = np.random.default_rng(_SEED)
        num = len(self._pairs)
        gains = [self._gain(goes, draw.integers(0, num, num)) for _ in range(_RESAMPLES)]
        low, high = np.quantile(gains, (0.025, 0.975))
        return float(low), float(high)
