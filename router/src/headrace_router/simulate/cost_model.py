"""What a step of an engine costs, and how to find that out from a worker's own log of steps.

    step = base + context x tokens of KV that decoding streams read
         + prefill x sum over prompt tokens of (1 + position / attention)

The defaults stand for a 70 B model on four GPUs: guesses (docs/routing-simulation.md). `fit` finds
the four numbers by least squares from a log of real steps, one JSON object per line with
`duration_s`, `context_tokens`, `prefill_tokens` and `prefill_positions` (sum of the positions of
the prompt tokens computed in that step; absent = 0).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class FitError(Exception):
    """The log cannot tell the costs apart."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step; see the module."""

    base_s: float = 0.015
    context_token_s: float = 3.4e-8
    prefill_token_s: float = 1e-4
    # Position at which attention costs as much again as all the rest. Tokens.
    attention_tokens: float = 53_000.0

    def step_s(self, context_tokens: int, prefill_s: float) -> float:
        """Return how long a step takes."""
        return self.base_s + self.context_token_s * context_tokens + prefill_s

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """Return what computing *num_tokens* prompt tokens from position *start* adds to steps."""
        positions = num_tokens * start + num_tokens * num_tokens / 2
        return self.prefill_token_s * (num_tokens + positions / self.attention_tokens)

    def cold_prefill_s(self, prompt_tokens: int, chunk_tokens: int) -> float:
        """Return how long an idle engine without any cache takes to the first token."""
        num_steps = -(-prompt_tokens // chunk_tokens)
        return num_steps * self.base_s + self.prefill_s(0, prompt_tokens)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a real engine."""

    duration_s: float
    context_tokens: float
    prefill_tokens: float
    # Sum of the positions of the prompt tokens computed.
    prefill_positions: float = 0.0


def read_step_log(path: Path) -> list[StepRecord]:
    """Read a worker's log of steps.

    Raises:
        FitError: a line is something else.
        OSError: the file cannot be read.
    """
    steps = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            step = StepRecord(
                float(row["duration_s"]),
                float(row["context_tokens"]),
                float(row["prefill_tokens"]),
                float(row.get("prefill_positions", 0.0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FitError(f"{path}, line {number}: {error!r}") from error
        steps.append(step)
    return steps


def fit(steps: Sequence[StepRecord]) -> CostModel:
    """Find the cost model that explains *steps* best. Costs are never negative.

    Raises:
        FitError: the steps are too few or too much alike.
    """
    # Over the duration: relative errors count, or long steps would drown what short ones tell.
    rows = [
        (
            1 / s.duration_s,
            s.context_tokens / s.duration_s,
            s.prefill_tokens / s.duration_s,
            s.prefill_positions / s.duration_s,
        )
        for s in steps
        if s.duration_s > 0
    ]
    used = [column for column in range(4) if column == 0 or any(row[column] for row in rows)]
    while True:
        found = dict.fromkeys(range(4), 0.0)
        parts = _least_squares([[row[column] for column in used] for row in rows])
        found.update(zip(used, parts, strict=True))
        negative = [column for column in used if found[column] < 0]
        if not negative:
            break
        used = [column for column in used if column not in negative]
    if found[2] <= 0:
        raise FitError("the log has no steps that tell what a prompt token costs")
    attention = found[2] / found[3] if found[3] > 0 else float("inf")
    return CostModel(found[0], found[1], found[2], attention)


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Find what makes each row's products add up to 1: normal equations of scaled columns."""
    size = len(rows[0]) if rows else 0
    if size == 0 or len(rows) < size:
        raise FitError("too few steps")
    scales = [max(abs(row[i]) for row in rows) or 1.0 for i in range(size)]
    # Each row with what it should add up to.
    scaled = [[*(row[i] / scales[i] for i in range(size)), 1.0] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size + 1)] for i in range(size)
    ]
    found = _solve(matrix, least_pivot=1e-12 * len(rows))
    return [value / scale for value, scale in zip(found, scales, strict=True)]


def _solve(matrix: list[list[float]], least_pivot: float) -> list[float]:
    """Solve linear equations, the right-hand side last in each row, by Gauss and Jordan."""
    size = len(matrix)
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < least_pivot:
            raise FitError("the steps are too much alike")
        for k in range(size):
            if k != i:
                ratio = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - ratio * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [row[size] / row[i] for i, row in enumerate(matrix)]
