"""What a simulation found: figures per policy, as JSON, as a table and as a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from headrace_router.simulate.fleet import Served
from headrace_router.simulate.scenario import Scenario

_PLOT_WIDTH, _PLOT_HEIGHT = 64, 16
_MARKS = "*o+x#@%&=~^"


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one policy over the scored requests."""

    policy: str
    # Cached prompt tokens / prompt tokens.
    hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    # Requests inside their goal / requests; refused ones are outside.
    slo_ratio: float
    # Requests inside their goal per second of the trace.
    goodput_per_s: float
    # Prefill seconds of the busiest worker / mean over all workers.
    imbalance_ratio: float
    # Time in the router's queue.
    queue_mean_s: float
    # Cached tokens that the router expected and the worker did not have / prompt tokens.
    phantom_ratio: float
    num_requests: int
    num_refused: int
    # Wall time of the simulation itself.
    run_s: float

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return asdict(self)


def score(
    policy: str,
    served: Sequence[Served],
    prefill_busy_s: Sequence[float],
    scenario: Scenario,
    run_s: float,
) -> Result:
    """Make the figures of one run.

    Args:
        policy: its name.
        served: every request, in order of arrival.
        prefill_busy_s: of each worker.
        scenario: which part is scored, and the goals.
        run_s: wall time.
    """
    scored = served[int(len(served) * scenario.warm_up_ratio) :]
    done = [one for one in scored if one.ttft_s is not None]
    ttfts = sorted(one.ttft_s for one in done if one.ttft_s is not None)
    num_good = sum(
        one.ttft_s is not None and one.ttft_s <= scenario.goal_s(one.request.prompt_tokens)
        for one in done
    )
    prompt_tokens = sum(one.request.prompt_tokens for one in done) or 1
    phantom = sum(max(one.predicted_cached_tokens - one.cached_tokens, 0) for one in done)
    span_s = scored[-1].request.at_s - scored[0].request.at_s
    mean_busy_s = sum(prefill_busy_s) / len(prefill_busy_s)
    return Result(
        policy=policy,
        hit_ratio=sum(one.cached_tokens for one in done) / prompt_tokens,
        ttft_mean_s=sum(ttfts) / len(ttfts) if ttfts else math.nan,
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p99_s=quantile(ttfts, 0.99),
        slo_ratio=num_good / len(scored),
        goodput_per_s=num_good / span_s if span_s > 0 else float(num_good),
        imbalance_ratio=max(prefill_busy_s) / mean_busy_s if mean_busy_s > 0 else 1.0,
        queue_mean_s=sum(one.queue_s for one in done) / (len(done) or 1),
        phantom_ratio=phantom / prompt_tokens,
        num_requests=len(scored),
        num_refused=len(scored) - len(done),
        run_s=run_s,
    )


def quantile(in_order: Sequence[float], share: float) -> float:
    """Return the smallest value that *share* of the values do not exceed; NaN without any."""
    if not in_order:
        return math.nan
    return in_order[max(math.ceil(share * len(in_order)) - 1, 0)]


def table(results: Sequence[Result]) -> str:
    """Render results for people."""
    head = (
        f"{'policy':<17} {'hit':>6} {'TTFT mean':>10} {'p50':>8} {'p99':>8} {'in goal':>8}"
        f" {'goodput':>10} {'imbalance':>10} {'queued':>8}"
    )
    rows = [
        f"{one.policy:<17} {one.hit_ratio:>6.1%} {one.ttft_mean_s:>8.2f} s {one.ttft_p50_s:>6.2f} s"
        f" {one.ttft_p99_s:>6.1f} s {one.slo_ratio:>8.1%} {one.goodput_per_s:>6.2f} /s"
        f" {one.imbalance_ratio:>10.2f} {one.queue_mean_s:>6.2f} s"
        for one in results
    ]
    return "\n".join([head, *rows])


def plot(ttfts: Mapping[str, Sequence[float]]) -> str:
    """Draw the share of requests (up) that have their first token after so long (right, log)."""
    curves = {name: sorted(values) for name, values in ttfts.items() if values}
    if not curves:
        return ""
    low = max(min(values[0] for values in curves.values()), 0.01)
    high = max(max(values[-1] for values in curves.values()), low * 1.1)
    rows = [[" "] * _PLOT_WIDTH for _ in range(_PLOT_HEIGHT)]
    for mark, values in zip(_MARKS, curves.values(), strict=False):
        for x in range(_PLOT_WIDTH):
            limit = low * (high / low) ** (x / (_PLOT_WIDTH - 1))
            share = sum(value <= limit for value in values) / len(values)
            rows[_PLOT_HEIGHT - 1 - round(share * (_PLOT_HEIGHT - 1))][x] = mark
    legend = "  ".join(f"{mark} {name}" for mark, name in zip(_MARKS, curves, strict=False))
    lines = [
        f"{100 - round(idx * 100 / (_PLOT_HEIGHT - 1)):>4} % |{''.join(row).rstrip()}"
        for idx, row in enumerate(rows)
    ]
    margin, first = " " * 7, f"{low:.2f} s"
    axis = first + f"{high:.1f} s".rjust(_PLOT_WIDTH - len(first))
    head = "requests with a first token, by time"
    return "\n".join([head, *lines, margin + "-" * _PLOT_WIDTH, margin + axis, legend])
